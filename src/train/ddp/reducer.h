// The reducer of DistributedDataParallel turns the gradients from autograd's hooks into averaged gradients.
//
// A *synchronised backward* on every rank:
//
//   first gradient        begin(): no parameter is ready; registers finish() as autograd's end-of-backward callback
//   each gradient         gradient_ready(): copies it into its bucket and launches (averages) complete buckets,
//                         strictly in their order
//   end of backward       finish(): handles parameters without a gradient, launches the remaining buckets,
//                         waits for all and finalizes them; buffers become rank 0's
//
// To *finalize* a bucket is to give the averaged gradients back to the parameters, and to step the parameters if the
// optimizer is applied in backward. In that case a bucket is finalized as soon as it is averaged, possibly in the
// group's thread.
//
// The first backward has no buckets yet. It only records the order in which gradients become ready, and finish() lays
// out the buckets.
//
// If backward throws half-way (a peer died, or the program's own code failed), autograd drops the callback, and its
// destruction shows that this backward is over. If this rank has communicated by then, the group is aborted: the other
// ranks wait for buckets that will never be launched here, and the next backward would be matched with them.
//
// A module that changes after it was wrapped (converted, parameters added or replaced) would train without averaged
// gradients. Each gradient, and the beginning of each backward, check for such a change.
//
// Inside with_uneven_inputs a backward begins by exchanging which ranks are active (active_ranks.h). A rank without
// batches *shadows* the others: it makes the same calls with zeros. The first active rank then takes the role of rank
// 0.
//
// With virtual ranks (tree_average.h) only the last virtual rank of a rank has a synchronised backward. The others run
// theirs under no_sync, and keep_gradients() takes their gradients.
//
// Related files: bucket.h (which gradients share a bucket, its memory, when it is averaged), parameter.h (also copies
// buffers), delayed_gradients.h, active_ranks.h, stopwatch.h (statistics). reducer.cpp has the course of a backward,
// reducer_average.cpp the course of a bucket, reducer_virtual_ranks.cpp what virtual ranks add.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "train/ddp/active_ranks.h"
#include "train/ddp/bucket.h"
#include "train/ddp/delayed_gradients.h"
#include "train/ddp/parameter.h"
#include "train/ddp/stopwatch.h"
#include "train/ddp/tree_average.h"
#include "train/tensor/device.h"
#include <maniple/train/ddp.h>

namespace maniple::detail {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Collective.
  static std::shared_ptr<Reducer> make(TensorSource source, DdpOptions options);
  ~Reducer();

  const DdpOptions& options() const noexcept { return options_; }
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  DdpStatistics statistics() const;

  /// Gives every parameter a hook that replaces its previous one. Not inside a backward.
  void attach_hooks();
  /// Throws unless the module has the parameters it had at construction, with the same dtype and device.
  void require_unchanged();
  void set_weight(double weight);
  void register_hook(CommHook hook);
  void make_optimizers(const OptimizerFactory& make);
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers() const;
  std::vector<torch::Tensor> trained_parameters() const;
  void pause() noexcept { ++paused_; }
  void resume() noexcept { --paused_; }

  /// Averages over virtual ranks from now on. Throws InvalidArgument, before anything is changed, if that cannot be
  /// combined with the options or with what was called before.
  void use_virtual_ranks(int total);
  /// After the backward of a virtual rank under no_sync: takes its gradients.
  void keep_gradients();
  void drop_kept() noexcept;

  // For with_uneven_inputs: uneven_inputs.cpp.
  void start_uneven_inputs(const ActiveRanks::Mode& mode);
  void end_uneven_inputs() noexcept;
  ActiveRanks& active_ranks() noexcept { return active_; }
  void shadow();            ///< takes part in one synchronised backward of the other ranks
  void copy_final_model();  ///< copies from the first of the ranks that were active last; collective
  /// Runs `communicate`. If an error may be caused by a rank without batches, the error text mentions that.
  void explained(const std::function<void()>& communicate) const;
  [[noreturn]] void fail(const std::string& text);  ///< on all ranks: aborts the group

 private:
  class EndOfBackward;  // autograd's callback

  /// State of the synchronised backward under way.
  enum class Backward : std::uint8_t {
    none,
    computing,  ///< this rank has communicated nothing yet
    averaging,  ///< this rank has communicated: if the backward does not reach its end, no rank may continue
    shadowing,  ///< other ranks compute; this rank has no batch and averages zeros
  };
  /// static_graph: which ranks' gradients are known from an earlier backward.
  enum class Graph : std::uint8_t {
    unknown,
    own,     ///< this rank's: Parameter::expected
    shared,  ///< all ranks': Parameter::used is final
  };

  Reducer(TensorSource source, DdpOptions options);
  std::string added_parameter() const;  ///< describes an added parameter and what to do; empty if there is none

  // A backward: reducer.cpp.
  void gradient_ready(std::size_t index);
  void gradient_accumulated(Parameter& parameter);
  void begin();                      // none -> computing
  void begin_to_average() noexcept;  // computing -> averaging; no effect while shadowing
  void finish();
  void end();               // -> none
  void abandon() noexcept;  // -> none
  void reset();
  void cancel(Bucket& bucket) noexcept;
  void require_used();
  [[noreturn]] void fail_unused(const std::vector<const Parameter*>& unused);
  std::vector<bool> used_here() const;
  std::vector<torch::Tensor> find_buffers();
  void copy_buffers();

  // The course of a bucket: reducer_average.cpp.
  void lay_out();
  void launch_complete();
  void launch(Bucket& bucket);
  void launch_on_device(Bucket& bucket);
  void scale(Bucket& bucket);
  void copy_in_absent(Parameter& parameter);
  void copy_in_zeros(Parameter& parameter);
  void average_all();
  void wait_for(Bucket& bucket);
  void finalize(Bucket& bucket);
  static void wait_for_leftover(Bucket& bucket) noexcept;

  bool computes() const noexcept { return backward_ == Backward::computing || backward_ == Backward::averaging; }
  bool shadows() const noexcept { return backward_ == Backward::shadowing; }
  bool exchanges_used() const {
    return options_.static_graph ? graph_ != Graph::shared : options_.find_unused_parameters;
  }
  void learn_graph();

  DdpOptions options_;
  std::shared_ptr<ProcessGroup> group_;
  Overlap overlap_ = Overlap::none;
  TensorSource source_;
  std::vector<Parameter> parameters_;
  std::unordered_set<const void*> known_;  // the TensorImpls of the parameters
  std::vector<torch::Tensor> state_;       // all parameters, then all buffers
  std::size_t first_buffer_ = 0;           // in state_
  Replicator buffers_;
  CommHook hook_;
  bool steps_in_backward_ = false;  // every parameter has its own optimizer
  int paused_ = 0;
  double weight_ = 1;

  std::vector<Bucket> buckets_;  // empty until lay_out()
  SideStream side_;              // for buckets on GPUs; destroyed before the buckets
  std::optional<DelayedGradients> delayed_;
  std::optional<TreeAverage> tree_;  // with virtual ranks
  ActiveRanks active_;
  Graph graph_ = Graph::unknown;

  std::mutex ready_mutex_;  // autograd has one thread for the CPU and one per GPU
  // State of the backward under way.
  Backward backward_ = Backward::none;
  std::vector<std::size_t> ready_order_;  // parameters; only in the first backward
  std::size_t next_ = 0;                  // the next bucket to launch
  std::optional<double> factor_;          // factor for this rank's gradients
  Stopwatch watch_;
};

}  // namespace maniple::detail
