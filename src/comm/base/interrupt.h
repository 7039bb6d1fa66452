// A question that a binding wants asked while a thread sleeps in an operation: has a signal come that ends it?
//
// A handler of a language like Python only notes a signal; somebody has to look. The operation runs in the caller's own
// thread, so only the places where it sleeps can. They call `check` before they sleep, and do not sleep longer than
// `kLook` where a question is set.
#pragma once

#include <chrono>

#include <maniple/comm/error.h>

namespace maniple {

class Interrupt {
 public:
  using Question = int (*)(void* context);
  static constexpr auto kLook = std::chrono::milliseconds(100);

  /// Of the calling thread, for as long as this object lives. A null question: none.
  Interrupt(Question question, void* context) : before_(current()) { current() = {question, context}; }
  ~Interrupt() { current() = before_; }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool is_set() noexcept { return current().question != nullptr; }
  /// Throws `Aborted` if the answer is yes.
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
