// The heart of DistributedDataParallel: from autograd's hooks to averaged gradients.
//
// A *synchronised backward* goes like this on every rank:
//
//   first gradient        begin(): all parameters are awaited; autograd is asked to call back at its end
//   each gradient         it is taken into its bucket; a bucket that is complete may be launched, strictly in the order
//                         of buckets
//   end of backward       finish(): gradients that never came are dealt with (see missing.h); the remaining buckets are
//                         launched; all are waited for; gradients are given back; buffers become rank 0's
//
// The first one has no buckets yet: it only notes the order in which gradients come, and finish() lays the buckets out.
//
// If backward throws half-way (a peer died, or the user's own code failed) autograd drops the callback; its destruction
// tells us that this backward is over.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
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
  static std::shared_ptr<Reducer> make(const torch::nn::Module& module, DdpOptions options);

  const DdpOptions& options() const noexcept { return options_; }
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  DdpStatistics statistics() const;

  /// Throws unless every parameter still has the dtype and device that it had at construction.
  void require_unchanged() const;
  void set_weight(double weight);
  void register_hook(CommHook hook);
  void pause() noexcept { ++paused_; }
  void resume() noexcept { --paused_; }

 private:
  struct Home {
    std::size_t bucket = 0;
    std::size_t place = 0;  // in the bucket
  };
  class EndOfBackward;  // autograd's callback

  Reducer(const torch::nn::Module& module, DdpOptions options);
  void attach_hooks();

  // A backward.
  void gradient_came(std::size_t parameter);
  void begin();
  void finish();
  void abandon() noexcept;

  // Its parts.
  void lay_out();
  void launch_complete();
  void launch(Bucket& bucket);
  void scale(Bucket& bucket);
  void take_absent(std::size_t parameter);
  void average_all();
  void wait_for(Bucket& bucket);
  static void await_leftover(Bucket& bucket) noexcept;
  [[noreturn]] void fail(const std::string& text);
  std::string who() const;
  bool expected(std::size_t parameter) const { return expected_.empty() || expected_[parameter]; }

  DdpOptions options_;
  std::shared_ptr<ProcessGroup> group_;
  Overlap overlap_ = Overlap::none;
  std::vector<NamedTensor> parameters_;
  std::vector<torch::ScalarType> dtypes_;  // of the parameters, at construction
  Replicator buffers_;
  CommHook hook_;
  std::vector<GradientHook> hooks_;
  int paused_ = 0;
  double weight_ = 1;

  std::vector<Bucket> buckets_;  // empty until laid out
  std::vector<Home> homes_;      // by parameter
  std::vector<bool> expected_;   // static_graph, after the first backward: which parameters get a gradient
  std::vector<bool> used_;       // static_graph: on any rank

  // Of the backward under way.
  bool running_ = false;
  std::vector<bool> came_;
  std::vector<std::size_t> arrival_;  // only in the first
  std::size_t next_ = 0;              // the bucket to be launched next
  std::optional<double> factor_;      // Average::samples: what this rank's gradient is multiplied by
  std::vector<std::pair<std::size_t, torch::Tensor>> saved_;  // gradients of absent parameters, as they were
  Stopwatch watch_;
};

}  // namespace maniple
