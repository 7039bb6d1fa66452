// A link between virtual hosts that loses packets at random, for kernels without netem.
//
// Every host gets a TUN device and routes to the other hosts through it. A thread of this process moves packets between
// the devices and drops a given fraction of them, in each direction. It drops nothing until told to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/unique_fd.h"
#include "tools/bench/virtual_network.h"

namespace maniple::harness {

class LossyLink {
 public:
  explicit LossyLink(const bench::VirtualNetwork& network);
  ~LossyLink();
  LossyLink(const LossyLink&) = delete;
  LossyLink& operator=(const LossyLink&) = delete;

  /// The reason why no such link can be made here; empty if one can.
  static std::string why_not();

  /// Drops that fraction of all packets, from now on for `duration`.
  void lose(double fraction, std::chrono::duration<double> duration);
  std::uint64_t lost() const noexcept { return lost_; }

 private:
  void run();
  void forward(int from);

  std::vector<UniqueFd> devices_;  ///< by host
  UniqueFd stop_;
  std::atomic<double> fraction_{0};
  std::atomic<std::chrono::steady_clock::time_point> until_{};
  std::atomic<std::uint64_t> lost_{0};
  std::thread thread_;
};

}  // namespace maniple::harness
