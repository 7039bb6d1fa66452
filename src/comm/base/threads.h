// Threads: starting one, and whether it is one of a group's own.
//
// start_thread makes a std::thread that says what it was for when the system has no more threads: its own exception is
// the bare text of errno.
#pragma once

#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/base/system_error.h"

namespace maniple {

/// `purpose` completes "a thread for ...". Throws SystemError.
template <class Body>
std::thread start_thread(const char* purpose, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    throw SystemError(std::string("a thread for ") + purpose + ": " + start_error_text(code), code);
  }
}

/// Runs `work` in a thread that nobody joins. A process that ends by exit() waits for it, some seconds at most: it may
/// use what exit() takes down. False when the system has no more threads; then nothing has run.
bool run_apart(std::function<void()> work) noexcept;

/// For work that uses a library which takes itself down at exit: called once that has started, run_apart's is awaited
/// before it.
void await_apart_at_exit() noexcept;

/// Whether the calling thread is one of a group's own, which run what users attach to a Work.
inline thread_local bool on_group_thread = false;

}  // namespace maniple
