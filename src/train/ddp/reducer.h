// The reducer of DistributedDataParallel: from autograd's hooks to averaged gradients.
//
// A *synchronised backward* on every rank:
//
//   first gradient        begin(): no parameter is ready; autograd is asked to call finish() at its end
//   each gradient         gradient_ready(): it is copied into its bucket; complete buckets are launched (averaged),
//                         strictly in their order
//   end of backward       finish(): parameters without a gradient are dealt with; the remaining buckets are launched;
//                         all are waited for and finalized; buffers become rank 0's
//
// To *finalize* a bucket is to give the averaged gradients back to the parameters, and to step them where the optimizer
// is applied in backward; in that case a bucket is finalized as soon as it is averaged, if need be in the group's
// thread.
//
// The first backward has no buckets yet: it only notes the order in which gradients are ready, and finish() lays the
// buckets out.
//
// If backward throws half-way (a peer died, or the program's own code failed) autograd drops the callback; its
// destruction shows that this backward is over. If it has communicated by then, the group is aborted: the other ranks
// wait for buckets that will never be launched here, and the next backward would be paired with them.
//
// A module that changes after it was wrapped (converted, parameters added or replaced) would train without its
// gradients being averaged. Each gradient, and the beginning of each backward, check for that.
//
// Inside with_uneven_inputs a backward begins by exchanging which ranks are active (active_ranks.h). A rank without
// batches *shadows* the others: it makes the same calls with zeros. What otherwise comes from rank 0 comes from the
// first active rank.
//
// Where to find what: bucket.h (which gradients share a bucket, its memory, when it is averaged), parameter.h (also the
// copying of buffers), delayed_gradients.h, active_ranks.h, stopwatch.h (statistics). reducer.cpp is the course of a
// backward, reducer_average.cpp what happens to a bucket.
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

  /// Gives every parameter its hook, in place of the one that it had. Not in a backward.
  void attach_hooks();
  /// Throws unless the module's parameters are those of construction, with the same dtype and device.
  void require_unchanged();
  void set_weight(double weight);
  void register_hook(CommHook hook);
  void make_optimizers(const OptimizerFactory& make);
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers() const;
  std::vector<torch::Tensor> trained_parameters() const;
  void pause() noexcept { ++paused_; }
  void resume() noexcept { --paused_; }

  // For with_uneven_inputs: uneven_inputs.cpp.
  void start_uneven_inputs(const ActiveRanks::Mode& mode);
  void end_uneven_inputs() noexcept;
  ActiveRanks& active_ranks() noexcept { return active_; }
  void shadow();            ///< one synchronised backward of the others
  void copy_final_model();  ///< collective; from the first of the ranks that were active last
  /// Runs `communicate`; an error that a rank without batches would cause says so.
  void explained(const std::function<void()>& communicate) const;
  [[noreturn]] void fail(const std::string& text);  ///< on all ranks: the group is aborted

 private:
  class EndOfBackward;  // autograd's callback

  /// The synchronised backward under way.
  enum class Backward : std::uint8_t {
    none,
    computing,  ///< this rank has communicated nothing in it
    averaging,  ///< it has: if the backward does not reach its end, no rank may go on
    shadowing,  ///< others compute; this rank has no batch, and averages zeros
  };
  /// static_graph: whose gradients are known from an earlier backward.
  enum class Graph : std::uint8_t {
    unknown,
    own,     ///< this rank's: Parameter::expected
    shared,  ///< those of all ranks: Parameter::used stays as it is
  };

  Reducer(TensorSource source, DdpOptions options);
  std::string added_parameter() const;  ///< what is wrong and what to do, if there is one; otherwise empty

  // A backward: reducer.cpp.
  void gradient_ready(std::size_t index);
  void gradient_accumulated(Parameter& parameter);
  void begin();                      // none -> computing
  void begin_to_average() noexcept;  // computing -> averaging; while shadowing nothing changes
  void finish();
  void end();               // -> none
  void abandon() noexcept;  // -> none
  void reset();
  void cancel(Bucket& bucket) noexcept;
  void require_used();
  std::vector<bool> used_here() const;
  std::vector<torch::Tensor> find_buffers();
  void copy_buffers();

  // What happens to a bucket: reducer_average.cpp.
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
  bool steps_in_backward_ = false;  // every parameter has its optimizer
  int paused_ = 0;
  double weight_ = 1;

  std::vector<Bucket> buckets_;  // empty until laid out
  SideStream side_;              // for buckets on GPUs; destroyed before them
  std::optional<DelayedGradients> delayed_;
  ActiveRanks active_;
  Graph graph_ = Graph::unknown;

  std::mutex ready_mutex_;  // autograd has a thread for the CPU and one for each GPU
  // Of the backward under way.
  Backward backward_ = Backward::none;
  std::vector<std::size_t> ready_order_;  // parameters; only in the first
  std::size_t next_ = 0;                  // the bucket to be launched next
  std::optional<double> factor_;          // what this rank's gradient is multiplied by
  Stopwatch watch_;
};

}  // namespace maniple::detail
