// How a replica's thread computes: as the thread that called, but with a share of its intra-op threads.
#pragma once

#include <ATen/ThreadLocalState.h>

#include "tensor/torch_compat.h"

namespace maniple {

/// What the calling thread has set: grad mode, inference mode, autocast, profiling.
class CallerSettings {
 public:
  /// While it lives, this thread, which must be one of ours, has the caller's settings.
  class Scope {
   public:
    explicit Scope(const CallerSettings& settings) : guard_(settings.state_) {
      set_autocast_dtype(torch::kCPU, settings.cpu_dtype_);
      set_autocast_dtype(torch::kCUDA, settings.cuda_dtype_);
    }

   private:
    at::ThreadLocalStateGuard guard_;
  };

 private:
  at::ThreadLocalState state_;
  torch::ScalarType cpu_dtype_ = autocast_dtype(torch::kCPU), cuda_dtype_ = autocast_dtype(torch::kCUDA);
};

/// Operations of this thread use so many threads from now on; those of other threads stay as they are.
/// (at::set_num_threads would also decide for threads that are yet to come.)
void use_intra_op_threads(int threads);

/// While one lives, OpenBLAS uses at most so many threads for an operation. Its own threads serve one operation at a
/// time, so two replicas that multiply at once would wait for each other. It is a setting of the process: the last scope
/// to end restores it. Does nothing where matrices are multiplied by OpenMP threads (see above) or in the calling thread.
class BlasThreads {
 public:
  explicit BlasThreads(int threads);
  ~BlasThreads();
  BlasThreads(const BlasThreads&) = delete;
  BlasThreads& operator=(const BlasThreads&) = delete;
};

}  // namespace maniple
