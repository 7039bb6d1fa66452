// The definitions of maniple/c.h's opaque types, and the conversion of exceptions to its errors.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/interrupt.h"
#include <maniple/c.h>
#include <maniple/comm/process_group.h>

struct maniple_group {
  std::shared_ptr<maniple::ProcessGroup> group;
};

struct maniple_work {
  maniple::Work work;
  std::shared_ptr<int> source = {};  // only for irecv
};

struct maniple_memory {
  maniple::RegisteredMemory memory;
};

struct maniple_error {
  int kind = MANIPLE_SYSTEM;
  std::string text = {};
  std::vector<int> ranks = {};
};

namespace maniple {

/// Converts an exception to an error; null for none.
maniple_error* error_of(const std::exception_ptr& error) noexcept;

/// Polls the call's `interrupted` callback for as long as the result lives.
inline Interrupt interrupt_of(const maniple_call* call) {
  return call == nullptr ? Interrupt(nullptr, nullptr) : Interrupt(call->interrupted, call->context);
}

/// Runs `body`. Returns null, or the error of the exception it threw.
template <class Body>
maniple_error* guarded(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return nullptr;
  } catch (...) {
    return error_of(std::current_exception());
  }
}

}  // namespace maniple
