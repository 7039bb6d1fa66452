// The times of a backward, for DdpStatistics.
//
// Buckets are averaged one after another. The time of an average is counted from its launch, or from the end of the
// previous average if that is later, to its end.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include <maniple/train/ddp.h>

namespace maniple {

class Stopwatch {
 public:
  using Clock = std::chrono::steady_clock;

  void begin() {
    start_ = Clock::now();
    last_end_ = start_;
    comm_ = wait_ = Clock::duration::zero();
  }
  /// An average that ran from `launched` to `ended`.
  void communicated(Clock::time_point launched, Clock::time_point ended) {
    const auto from = std::max(launched, last_end_);
    if (ended > from) comm_ += ended - from;
    last_end_ = std::max(last_end_, ended);
  }
  void waited(Clock::duration time) { wait_ += time; }
  void end(bool counts) {
    ++backwards_;
    last_backward_ = Clock::now() - start_;
    last_comm_ = comm_;
    last_wait_ = wait_;
    if (!counts) return;
    ++counted_;
    total_backward_ += last_backward_;
    total_comm_ += comm_;
    total_wait_ += wait_;
  }

  void fill(DdpStatistics& into) const {
    const auto ms = [](Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); };
    const double n = static_cast<double>(std::max<std::uint64_t>(1, counted_));
    into.backwards = backwards_;
    into.backward_ms = ms(total_backward_) / n;
    into.comm_ms = ms(total_comm_) / n;
    into.wait_ms = ms(total_wait_) / n;
    into.last_backward_ms = ms(last_backward_);
    into.last_comm_ms = ms(last_comm_);
    into.last_wait_ms = ms(last_wait_);
  }

 private:
  Clock::time_point start_{}, last_end_{};
  Clock::duration comm_{}, wait_{}, last_backward_{}, last_comm_{}, last_wait_{};
  Clock::duration total_backward_{}, total_comm_{}, total_wait_{};
  std::uint64_t backwards_ = 0, counted_ = 0;
};

}  // namespace maniple
