// The parameters of DdpOptions::delay_all_reduce_named_params. Their gradients are averaged last, in separate buckets.
//
// Such a gradient may arrive in several pieces, so it stays where autograd puts it until all are known to be complete.
// They are complete when the gradient of param_to_hook_all_reduce, the *trigger*, is ready, or at the end of backward.
#pragma once

#include <string>
#include <vector>

#include "train/ddp/bucket.h"
#include "train/ddp/parameter.h"

namespace maniple {

class DelayedGradients {
 public:
  /// Marks the parameters that the options name. Throws InvalidArgument for unusable names. The references must outlive
  /// this object.
  DelayedGradients(const DdpOptions& options, std::vector<Parameter>& parameters, std::vector<Bucket>& buckets);

  /// A delayed gradient is ready before any other gradient. It may come from a nested backward, whose end is not the
  /// one to wait for, so it counts for the backward that begins next.
  static void ready_early(Parameter& parameter) { parameter.gradient = Parameter::Gradient::early; }
  void begin_backward();

  /// A delayed gradient is ready in the current backward. Returns what is wrong on this rank, or an empty string.
  std::string ready(const Parameter& parameter, int rank);

  bool is_trigger(std::size_t parameter) const noexcept { return parameter == trigger_; }
  /// Copies all delayed gradients into their buckets, which are then complete. Does nothing and returns false if one is
  /// still expected.
  bool release();

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::vector<Parameter>& parameters_;
  std::vector<Bucket>& buckets_;
  std::vector<std::size_t> delayed_;
  std::size_t trigger_ = kNone;
};

}  // namespace maniple
