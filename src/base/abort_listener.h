// A listener of an AbortSignal for as long as this object lives: also when the constructor of whoever holds it throws.
#pragma once

#include <functional>
#include <utility>

#include "base/abort_signal.h"

namespace maniple {

class AbortListener {
 public:
  AbortListener(AbortSignal& signal, std::function<void()> listener)
      : signal_(signal), ticket_(signal.on_raise(std::move(listener))) {}
  ~AbortListener() { signal_.forget(ticket_); }
  AbortListener(const AbortListener&) = delete;
  AbortListener& operator=(const AbortListener&) = delete;

 private:
  AbortSignal& signal_;
  int ticket_;
};

}  // namespace maniple
