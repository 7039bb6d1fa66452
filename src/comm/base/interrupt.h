// A callback of a language binding, polled while a thread waits in an operation: has a signal arrived that should end
// the operation?
//
// A signal handler of a language like Python only records the signal; the interpreter must poll for it later. An
// operation runs in the caller's own thread, so it polls where that thread sleeps: it calls `check` before sleeping
// and, while a callback is set, sleeps at most `kLook`.
#pragma once

#include <chrono>

#include <maniple/comm/error.h>

namespace maniple {

class Interrupt {
 public:
  using Question = int (*)(void* context);
  static constexpr auto kLook = std::chrono::milliseconds(100);

  /// Sets the calling thread's callback while this object lives. A null `question` clears it.
  Interrupt(Question question, void* context) : before_(current()) { current() = {question, context}; }
  ~Interrupt() { current() = before_; }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool is_set() noexcept { return current().question != nullptr; }
  /// Throws `Aborted` if the callback returns nonzero.
  static void check() {
    const Asked asked = current();
    if (asked.question != nullptr && asked.question(asked.context) != 0)
      throw Aborted("interrupted by a signal while it waited for other ranks");
  }

 private:
  struct Asked {
    Question question = nullptr;
    void* context = nullptr;
  };
  static Asked& current() noexcept {
    thread_local Asked asked;
    return asked;
  }
  Asked before_;
};

}  // namespace maniple
