// The context of one operation, passed down with the call: its deadline, and one callback of its caller.
//
// Calls normally go down, and completion comes back as a Work. The callback is a deliberate exception: the group passes
// the flight recorder's work to `while_waiting`, and the algorithm runs it at the point where it would only wait for
// other ranks. Recording the call earlier would delay all ranks by a tenth of the smallest operation.
#pragma once

#include <cstdint>
#include <utility>

#include <maniple/comm/deadline.h>

namespace maniple {

class OperationContext {
 public:
  explicit OperationContext(std::chrono::duration<double> limit) : limit_(limit) {}
  explicit OperationContext(Deadline deadline) : deadline_(deadline), since_(Deadline::Clock::now()), fixed_(true) {}

  /// The deadline starts at the first call, so an operation that never waits never reads the clock.
  Deadline deadline() {
    if (!fixed_) {
      deadline_ = Deadline::after(limit_);
      since_ = Deadline::Clock::now();
      fixed_ = true;
    }
    return deadline_;
  }
  /// Seconds since the deadline started, for messages.
  double waited() const { return std::chrono::duration<double>(Deadline::Clock::now() - since_).count(); }

  /// Sets the callback to run while this rank waits. Not owned: it must outlive the operation.
  template <class Callback>
  void while_waiting(Callback& callback) noexcept {
    callback_ = &callback;
    run_callback_ = [](void* it) { (*static_cast<Callback*>(it))(); };
  }
  /// The algorithm calls this once the other ranks can see this rank's contribution, before it waits for theirs. The
  /// first call runs the callback.
  void contribution_published() {
    if (void* callback = std::exchange(callback_, nullptr)) run_callback_(callback);
  }

  // Even reading the processor's counter (comm/base/ticks.h) takes a tenth of the smallest operation, so code that has
  // just read it leaves the value for the next reader. 0: no value.
  void set_start(std::uint64_t ticks) noexcept { start_ = ticks; }
  std::uint64_t take_start() noexcept { return std::exchange(start_, 0); }
  void set_end(std::uint64_t ticks) noexcept { end_ = ticks; }
  std::uint64_t take_end() noexcept { return std::exchange(end_, 0); }
  /// Drops both values, because they are stale.
  void forget_ticks() noexcept { start_ = end_ = 0; }

 private:
  std::chrono::duration<double> limit_{};
  Deadline deadline_;
  Deadline::Clock::time_point since_{};
  bool fixed_ = false;
  std::uint64_t start_ = 0;
  std::uint64_t end_ = 0;
  void* callback_ = nullptr;
  void (*run_callback_)(void*) = nullptr;
};

}  // namespace maniple
