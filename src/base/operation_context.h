// One operation's context: everything it waits for shares one deadline; and what it can do meanwhile.
#pragma once

#include <cstdint>
#include <utility>

#include <maniple/comm/deadline.h>

namespace maniple {

class OperationContext {
 public:
  explicit OperationContext(std::chrono::duration<double> limit) : limit_(limit) {}
  explicit OperationContext(Deadline deadline) : deadline_(deadline), since_(Deadline::Clock::now()), fixed_(true) {}

  /// Taken late: a call that never has to wait never reads the clock.
  Deadline deadline() {
    if (!fixed_) {
      deadline_ = Deadline::after(limit_);
      since_ = Deadline::Clock::now();
      fixed_ = true;
    }
    return deadline_;
  }
  /// Seconds of it that are used up, for messages.
  double waited() const { return std::chrono::duration<double>(Deadline::Clock::now() - since_).count(); }

  /// Work to be done once this rank's part is where the others see it, so that it does not keep them waiting.
  template <class Task>
  void meanwhile(Task& task) noexcept {
    task_ = &task;
    call_ = [](void* it) { (*static_cast<Task*>(it))(); };
  }
  /// Does that work, the first time it is called.
  void posted() {
    if (void* task = std::exchange(task_, nullptr)) call_(task);
  }

  // Reading even the processor's counter (base/ticks.h) takes as long as a tenth of the smallest operation, so who has just
  // read it leaves it for the next. 0: nobody has.
  void set_start(std::uint64_t ticks) noexcept { start_ = ticks; }
  std::uint64_t take_start() noexcept { return std::exchange(start_, 0); }
  void set_end(std::uint64_t ticks) noexcept { end_ = ticks; }
  std::uint64_t take_end() noexcept { return std::exchange(end_, 0); }
  /// Time has passed since: what was left is stale.
  void forget_ticks() noexcept { start_ = end_ = 0; }

 private:
  std::chrono::duration<double> limit_{};
  Deadline deadline_;
  Deadline::Clock::time_point since_{};
  bool fixed_ = false;
  std::uint64_t start_ = 0;
  std::uint64_t end_ = 0;
  void* task_ = nullptr;
  void (*call_)(void*) = nullptr;
};

}  // namespace maniple
