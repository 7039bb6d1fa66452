// The threads of the replicas, with the settings of whoever calls.
#pragma once

#include <vector>

#include <torch/torch.h>

#include "train/data_parallel/workers.h"

namespace maniple {

class ReplicaThreads {
 public:
  /// `threads`: as DataParallelOptions has it.
  ReplicaThreads(std::vector<torch::Device> devices, int threads);

  std::size_t size() const noexcept { return devices_.size(); }
  torch::Device device(std::size_t replica) const { return devices_[replica]; }

  /// Throws InvalidArgument in a thread of a replica, which would wait for itself.
  void require_outside() const;

  /// Runs task(0) .. task(count-1), each in the thread of its replica with its device current and the caller's settings.
  /// When all have ended, the first exception, by number of replica, is thrown as ReplicaError; `what` is what failed.
  void run(std::size_t count, const char* what, const Workers::Task& task);

 private:
  int intra_op_threads() const;

  std::vector<torch::Device> devices_;
  int threads_;
  Workers workers_;
};

}  // namespace maniple
