// Buckets: which gradients share one, its memory, and when it is averaged.
//
// A bucket is one piece of memory that holds the gradients of some parameters, and its state in the backward under way.
//
// Each gradient has a *view*: a tensor of the parameter's shape and strides whose memory is a part of the bucket's. (It
// is a tensor of its own and not a view in autograd's sense, so that zero_grad() may detach it.)
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

// Which gradients travel together: a pure function of sizes, dtypes and the order in which gradients are ready.
//
// Parameters are taken in that order and put into the open bucket of their dtype; a bucket that has reached its limit
// is closed. The first bucket of each dtype has a limit of its own. Buckets are numbered by when their last gradient
// is ready, because that is when they can be averaged. A parameter larger than the limit makes a bucket by itself or
// ends one.

struct PlannedParameter {
  std::size_t elements = 0;
  std::size_t element_bytes = 4;
  int kind = 0;  ///< dtype; parameters of different kinds do not share a bucket
};

struct PlannedBucket {
  std::vector<std::size_t> members;  ///< parameters, in the order in which their gradients are ready
  PackedLayout layout;               ///< of their gradients
};

struct BucketLimits {
  double first_bytes = 0;
  double bytes = 0;
};

/// `order` holds every index of `parameters` once.
std::vector<PlannedBucket> plan_buckets(std::span<const PlannedParameter> parameters,
                                        std::span<const std::size_t> order, const BucketLimits& limits);

class Bucket {
 public:
  /// It begins at `offset` bytes of `memory`, that of all buckets on its device.
  Bucket(int index, bool is_last, const PlannedBucket& plan, std::span<const Parameter> parameters,
         const RegisteredMemory& memory, std::size_t offset, bool gradients_live_here);

  int index() const noexcept { return index_; }
  const std::vector<std::size_t>& members() const noexcept { return members_; }  ///< indices of parameters
  const torch::Tensor& parameter(std::size_t i) const noexcept { return parameters_[i]; }
  const torch::Tensor& flat() const noexcept { return flat_; }
  const torch::Tensor& view(std::size_t i) const noexcept { return views_[i]; }
  Buffer buffer() const noexcept { return buffer_; }
  GradBucket for_hook() const;

  /// The parameter's gradient into its view: it is copied unless it lives there. One that is undefined counts as zero.
  /// Throws for a gradient that does not fit. On a GPU it is only noted, and copied by the next flush().
  void copy_in(std::size_t i);
  /// Copies what is noted, all in one kernel where LibTorch has it, and returns the tensors that were read.
  std::vector<torch::Tensor> flush();
  void forget_noted() noexcept { noted_.clear(); }

  /// After the average: the parameter's gradient is what the view holds.
  void copy_out(std::size_t i) const;

  /// A copy of the parameter's gradient if copy_in() leaves none elsewhere, otherwise undefined.
  torch::Tensor saved(std::size_t i) const;

  /// Sets the gradients of its parameters to none.
  void drop_gradients();

  int pending = 0;        ///< gradients that are not ready in this backward
  bool launched = false;  ///< its average is under way or done
  bool finalized =
      false;  ///< its parameters have the averaged gradients, and have taken their step where DDP does that
  /// True once somebody has decided about the step that follows the average: whoever sets it takes it, or drops it.
  std::shared_ptr<std::atomic<bool>> claimed;
  Work work;  ///< invalid when done at once
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

// Which way of overlapping communication with backward suits a group: what Overlap::automatic stands for.

/// What the choice depends on.
struct OverlapFacts {
  int hosts = 1;
  int cores = 1;                   ///< physical ones that the ranks of the (only) host may use together
  int threads = 1;                 ///< that they compute with together
  std::size_t gradient_bytes = 0;  ///< of a rank
};

/// Between hosts there is a wire to wait for. Within one, averaging is work for cores: a thread of its own pays when
/// there are as many cores again that nobody computes on, and enough work that waking it does not matter.
Overlap choose_overlap(const OverlapFacts& facts) noexcept;

/// `requested`, unless that is automatic: then a choice on which all ranks agree, which is a collective call.
Overlap resolve_overlap(Overlap requested, ProcessGroup& group, std::size_t gradient_bytes);

}  // namespace maniple
