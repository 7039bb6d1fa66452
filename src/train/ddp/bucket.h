// Buckets of gradients: which gradients share a bucket, its memory, and when it is averaged.
//
// A bucket is one block of memory that holds the gradients of some parameters, and its state in the current backward.
//
// Each gradient has a *view*: a tensor with the parameter's shape and strides whose memory is part of the bucket. (It
// is a separate tensor, not a view in autograd's sense, so that zero_grad() may detach it.)
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <torch/types.h>

#include "train/ddp/parameter.h"
#include "train/packed_layout.h"
#include <maniple/comm/process_group.h>
#include <maniple/train/comm_hooks.h>
#include <maniple/train/ddp.h>

namespace maniple {

// The assignment of gradients to buckets: a pure function of sizes, dtypes and the order in which gradients become
// ready.
//
// Parameters are taken in that order and put into the open bucket of their dtype; a bucket that has reached its limit
// is closed. The first bucket of each dtype has its own limit. Buckets are numbered in the order in which their last
// gradient becomes ready, because only then can they be averaged. A parameter larger than the limit fills a bucket by
// itself or ends one.

struct PlannedParameter {
  std::size_t elements = 0;
  std::size_t element_bytes = 4;
  int kind = 0;  ///< dtype; parameters of different kinds do not share a bucket
};

struct PlannedBucket {
  std::vector<std::size_t> members;  ///< parameters, in the order in which their gradients are ready
  PackedLayout layout;               ///< layout of the gradients
};

struct BucketLimits {
  double first_bytes = 0;
  double bytes = 0;
};

/// `order` contains every index of `parameters` once.
std::vector<PlannedBucket> plan_buckets(std::span<const PlannedParameter> parameters,
                                        std::span<const std::size_t> order, const BucketLimits& limits);

class Bucket {
 public:
  /// The bucket begins at byte `offset` of `memory`, which holds all buckets of its device.
  Bucket(int index, bool is_last, const PlannedBucket& plan, std::span<const Parameter> parameters,
         const RegisteredMemory& memory, std::size_t offset, bool gradients_live_here);

  int index() const noexcept { return index_; }
  const std::vector<std::size_t>& members() const noexcept { return members_; }  ///< indices of parameters
  const torch::Tensor& parameter(std::size_t i) const noexcept { return parameters_[i]; }
  const torch::Tensor& flat() const noexcept { return flat_; }
  const torch::Tensor& view(std::size_t i) const noexcept { return views_[i]; }
  Buffer buffer() const noexcept { return buffer_; }
  GradBucket for_hook() const;

  /// Copies the parameter's gradient into its view, unless the gradient lives there. An undefined gradient counts as
  /// zero. Throws if the gradient does not fit. On a GPU the copy is only noted; the next flush() makes it.
  void copy_in(std::size_t i);
  /// Makes the noted copies, in one kernel if LibTorch has it. Returns the tensors that were read.
  std::vector<torch::Tensor> flush();
  void forget_noted() noexcept { noted_.clear(); }

  /// After the average: sets the parameter's gradient to the contents of the view.
  void copy_out(std::size_t i) const;

  /// A copy of the parameter's gradient if copy_in() leaves no other copy, otherwise undefined.
  torch::Tensor saved(std::size_t i) const;

  /// Sets the gradients of the bucket's parameters to none.
  void drop_gradients();

  int pending = 0;        ///< gradients not yet ready in this backward
  bool launched = false;  ///< its average is under way or done
  bool finalized =
      false;  ///< its parameters have their averaged gradients, and have stepped if DDP applies the optimizer
  /// True once the step after the average has been decided: the thread that sets it takes or drops that step.
  std::shared_ptr<std::atomic<bool>> claimed;
  Work work;  ///< invalid if done at once
  std::chrono::steady_clock::time_point launched_at{};
  std::shared_ptr<std::atomic<std::chrono::steady_clock::rep>> ended_at;  ///< set before `work` is done

 private:
  bool lives_here(const torch::Tensor& gradient, std::size_t i) const;

  int index_;
  bool is_last_;
  bool gradients_live_here_;
  std::vector<std::size_t> members_;
  std::vector<std::string> names_;
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> views_;
  std::vector<std::size_t> noted_;
  torch::Tensor flat_;
  Buffer buffer_;
};

// The choice behind Overlap::automatic: how a group overlaps communication with backward.

/// The inputs of the choice.
struct OverlapFacts {
  int hosts = 1;
  int cores = 1;                   ///< physical cores that the ranks of the (only) host may use together
  int threads = 1;                 ///< threads that those ranks compute with together
  std::size_t gradient_bytes = 0;  ///< of one rank
};

/// Between hosts, communication waits for the network. Within one host, averaging is work for cores: a separate thread
/// pays only if as many cores again are idle, and if there is enough work to make waking it negligible.
Overlap choose_overlap(const OverlapFacts& facts) noexcept;

/// `requested`, unless it is automatic. Then all ranks agree on a choice, and the call is collective.
Overlap resolve_overlap(Overlap requested, ProcessGroup& group, std::size_t gradient_bytes);

}  // namespace maniple
