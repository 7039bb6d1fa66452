#include "plugins/nccl_ranks.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include <gtest/gtest.h>

namespace maniple::gpu_tests {

void NcclRank::make(double limit_s) {
  DeviceContext context = base_.make_context();
  for (int& global_rank : context.global_ranks) global_rank += 10;  // other numbers, to tell them apart in texts
  context.deadline = Deadline::after(std::chrono::duration<double>(limit_s));
  context.abort = &token;
  plugin = base_.entry().make(context);
}

void NcclRank::report(const std::string& text) const {
  std::printf("    rank %d/%d: %s\n", rank, size, text.c_str());
  std::fflush(stdout);
}

void run_ranks(int size, const std::function<void(NcclRank&)>& body, const RunLimits& limits) {
  EXPECT_EQ(device_test::run_ranks(size, limits.seconds,
                                   [&](device_test::Rank& base) {
                                     if (base.rank() == limits.killed) base.expect_to_die();
                                     const std::string host = "host" + std::to_string(base.rank());
                                     if (!limits.one_host) ::setenv("NCCL_HOSTID", host.c_str(), 1);
                                     ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
                                     NcclRank rank(base);
                                     CUDA(::cudaSetDevice(0));
                                     CUDA(::cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
                                     body(rank);
                                   }),
            "");
}

std::string why_not() {
  static const std::string reason = [] {
    const std::string failure = device_test::run_ranks(1, 30, [](device_test::Rank&) {
      int count = 0;
      require(::cudaGetDeviceCount(&count) == cudaSuccess && count > 0, "no GPU");
    });
    return failure.empty() ? failure : "needs NCCL and a GPU: " + failure;
  }();
  return reason;
}

std::string error_of(ErrorKind kind, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.kind() == kind) return error.what();
    throw;
  }
  throw std::runtime_error(std::string("no ") + to_string(kind) + " was thrown");
}

bool becomes(double limit_s, const std::function<bool()>& condition) {
  for (const double end = now_s() + limit_s; now_s() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // sleep: the device can only be polled
  }
  return condition();
}

}  // namespace maniple::gpu_tests
