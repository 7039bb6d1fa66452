// Tests of the nccl plugin alone, on the ranks of device_ranks.h: processes forked by the test, all on one GPU.
//
//   run_ranks(2, [](NcclRank& rank) { rank.make(); ... });
//
// NCCL refuses two ranks of one GPU unless it takes them for ranks of two hosts (NCCL_HOSTID). A check that fails
// throws, with the test's own text. The test's own process never calls CUDA: it must be able to fork.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "plugins/device_ranks.h"

namespace maniple::gpu_tests {

class FlagToken final : public AbortToken {
 public:
  bool aborted() const noexcept override { return raised.load(); }
  std::atomic<bool> raised = false;
};

using device_test::require;
inline void cuda(cudaError_t result, const char* what) {
  require(result == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(result));
}
#define CUDA(call) ::maniple::gpu_tests::cuda(call, #call)

/// From host memory that is not pinned: cudaMemcpy alone may return before the bytes are there, and the streams
/// of these tests do not wait for it.
inline void copy_to(void* device, const std::vector<std::byte>& values) {
  CUDA(::cudaMemcpy(device, values.data(), values.size(), cudaMemcpyDefault));
  CUDA(::cudaStreamSynchronize(nullptr));
}

/// Device memory, filled from and read back to the host.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    CUDA(::cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)));
  }
  explicit DeviceBytes(const std::vector<std::byte>& values) : DeviceBytes(values.size()) { write(values); }
  ~DeviceBytes() { ::cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  void write(const std::vector<std::byte>& values) const { copy_to(data_, values); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> values(bytes_);
    CUDA(::cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDefault));
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class NcclRank {
 public:
  explicit NcclRank(device_test::Rank& base) : rank(base.rank()), size(base.size()), store(base.store()), base_(base) {}

  const int rank;
  const int size;
  FlagToken token;
  const std::shared_ptr<Store> store;
  std::unique_ptr<DevicePlugin> plugin;
  cudaStream_t stream = nullptr;

  void make(double limit_s = 20);
  void report(const std::string& text) const;  ///< a line of output

  /// On this rank's stream; waits for it.
  void run(Operation operation) {
    operation.device = Device::cuda(0);
    operation.stream = stream;
    plugin->enqueue(operation);
    wait();
  }
  void wait() const { CUDA(::cudaStreamSynchronize(stream)); }

 private:
  device_test::Rank& base_;
};

struct RunLimits {
  double seconds = 60;
  int killed = -1;        ///< this rank may end by SIGKILL
  bool one_host = false;  ///< no NCCL_HOSTID: NCCL sees that the ranks share a GPU
};

/// Fails the test with the text of the first rank that failed.
void run_ranks(int size, const std::function<void(NcclRank&)>& body, const RunLimits& limits = {});

/// Empty, or why nothing can be tested here. Found in a process of its own.
std::string why_not();

/// The error text that `body` throws; fails if it throws none of that kind.
std::string error_of(ErrorKind kind, const std::function<void()>& body);

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/// Polls until the condition holds; false when the limit passed.
bool becomes(double limit_s, const std::function<bool()>& condition);

}  // namespace maniple::gpu_tests
