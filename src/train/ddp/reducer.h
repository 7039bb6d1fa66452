// The heart of DistributedDataParallel: from autograd's hooks to averaged gradients.
//
// A *synchronised backward* goes like this on every rank:
//
//   first gradient        begin(): all parameters are awaited; autograd is asked to call back at its end
//   each gradient         it is taken into its bucket; a bucket that is complete may be launched, strictly in the order
//                         of buckets
//   end of backward       finish(): gradients that never came are dealt with (see unused_parameters.h); the remaining buckets are
//                         launched; all are waited for and settled; buffers become rank 0's
//
// To *settle* a bucket is to give the averaged gradients back to the parameters, and to step them where the optimizer is
// applied in backward; in that case a bucket is settled as soon as it is averaged, if need be in the group's thread.
//
// The first one has no buckets yet: it only notes the order in which gradients come, and finish() lays the buckets out.
//
// If backward throws half-way (a peer died, or the user's own code failed) autograd drops the callback; its destruction
// tells us that this backward is over. If it has communicated by then, the group is aborted: the other ranks wait for buckets
// that will never come, and the next backward would pair its own with them.
//
// A module that changes after it was wrapped (converted, parameters added or replaced) would train without its gradients being
// averaged. Each gradient, and the beginning of each backward, look for that.
//
// In join mode (see uneven_inputs.h) a backward begins with a meeting that says which ranks still train. A rank that has run out
// *shadows*: it makes the same calls with zeros. What otherwise comes from rank 0 comes from the first active rank.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "tensor/torch_compat.h"
#include "train/ddp/bucket.h"
#include "train/ddp/module_tensors.h"
#include "train/ddp/replicate.h"
#include "train/ddp/stopwatch.h"
#include <maniple/train/ddp.h>

namespace maniple {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Collective.
  static std::shared_ptr<Reducer> make(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options);
  ~Reducer();

  const DdpOptions& options() const noexcept { return options_; }
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  DdpStatistics statistics() const;

  /// Throws unless the module's parameters are those of construction, with the same dtype and device.
  void require_unchanged() const;
  void set_weight(double weight);
  void register_hook(CommHook hook);
  void make_optimizers(const OptimizerFactory& make);
  const std::vector<std::shared_ptr<torch::optim::Optimizer>>& optimizers() const noexcept { return optimizers_; }
  void pause() noexcept { ++paused_; }
  void resume() noexcept { --paused_; }

  // Join mode: reducer_uneven_inputs.cpp.
  struct UnevenInputsMode {
    bool divide_by_initial_world_size = true;
    bool throw_on_early_termination = false;
  };
  void start_join(UnevenInputsMode mode);
  void end_join() noexcept;
  bool meet(bool active);   ///< collective; whether any rank is active. Throws UnevenInputs where the mode wants it
  void shadow();            ///< one synchronised backward of the others
  void copy_final_model();  ///< collective; from the first rank of those that were active last
  /// Runs `communicate`; an error that a rank without batches would cause says so.
  void explained(const std::function<void()>& communicate) const;
  [[noreturn]] void fail(const std::string& text);  ///< on all ranks: the group is aborted

 private:
  struct Home {
    std::size_t bucket = 0;
    std::size_t place = 0;  // in the bucket
  };
  class EndOfBackward;  // autograd's callback

  Reducer(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options);
  void note_delayed();
  void attach_hooks();
  /// What is wrong with the parameters, with what to do; empty if nothing is.
  std::string converted(std::size_t parameter) const;
  std::string added() const;

  // A backward: reducer.cpp.
  void gradient_paused(std::size_t parameter);
  void gradient_came(std::size_t parameter);
  void delayed_came(std::size_t parameter);
  void release_delayed();
  void begin();
  void reset();
  void finish();
  void abandon() noexcept;
  void forget(Bucket& bucket) noexcept;

  // Its parts: reducer_average.cpp.
  void lay_out();
  void launch_complete();
  void launch(Bucket& bucket);
  void scale(Bucket& bucket);
  void take_absent(std::size_t parameter);
  void take_zero(std::size_t parameter);
  void average_all();
  void wait_for(Bucket& bucket);
  void settle(Bucket& bucket);
  static void await_leftover(Bucket& bucket) noexcept;

  std::vector<bool> used_here() const;
  std::string who() const;
  bool expected(std::size_t parameter) const { return expected_.empty() || expected_[parameter]; }
  bool asks_who_is_used() const { return options_.static_graph ? !usage_known_ : options_.find_unused_parameters; }

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  DdpOptions options_;
  std::shared_ptr<ProcessGroup> group_;
  Overlap overlap_ = Overlap::none;
  std::weak_ptr<const torch::nn::Module> module_;
  std::vector<NamedTensor> parameters_;
  std::unordered_set<const void*> known_;  // their TensorImpls
  std::vector<torch::ScalarType> dtypes_;  // of the parameters, at construction
  std::vector<torch::Tensor> state_;       // all parameters and buffers
  Replicator buffers_;
  CommHook hook_;
  std::vector<GradientHook> hooks_;
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers_;  // by parameter, or empty
  std::vector<bool> delayed_;                                         // by parameter
  std::size_t trigger_ = kNone;                                       // the parameter that releases them
  int paused_ = 0;
  double weight_ = 1;

  std::vector<Bucket> buckets_;  // empty until laid out
  std::vector<Home> homes_;      // by parameter
  std::vector<bool> expected_;   // static_graph, after the first backward: which parameters get a gradient
  std::vector<bool> used_;       // find_unused_parameters, static_graph: on any rank
  bool usage_known_ = false;     // static_graph: a backward with all ranks has told
  std::vector<bool> accumulated_;  // which got a gradient under no_sync since the last synchronised backward

  // Join mode.
  std::optional<UnevenInputsMode> join_;
  int active_;      // ranks in the backward under way; all of them outside join mode
  int source_ = 0;  // the first of them
  int last_source_ = 0;
  bool uneven_ = false;  // some rank has run out since join mode began

  // Of the backward under way.
  bool running_ = false;
  bool shadowing_ = false;
  bool communicated_ = false;  // if it does not come to its end, no rank may go on
  std::vector<bool> came_;
  std::vector<bool> came_early_;      // delayed ones that came before any other
  std::vector<std::size_t> arrival_;  // only in the first
  std::size_t next_ = 0;              // the bucket to be launched next
  std::optional<double> factor_;      // what this rank's gradient is multiplied by
  std::vector<torch::Tensor> saved_;  // gradients of absent parameters, as they were; by parameter
  Stopwatch watch_;
};

}  // namespace maniple
