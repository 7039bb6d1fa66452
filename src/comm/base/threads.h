// Starts threads, and identifies a group's own threads.
//
// start_thread returns a std::thread. When the system is out of threads, its error names the purpose of the thread,
// where std::thread reports the bare errno text.
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

/// Runs `work` in a detached thread. exit() waits for it, up to a few seconds, because it may use what exit() tears
/// down. Returns false if the system is out of threads; `work` has not run then.
bool run_apart(std::function<void()> work) noexcept;

/// For work that uses a library with its own exit handlers: call this after the library has initialised, and exit()
/// waits for detached threads before those handlers run.
void await_apart_at_exit() noexcept;

/// Whether the calling thread is one of a group's own threads, which run the callbacks users attach to a Work.
inline thread_local bool on_group_thread = false;

}  // namespace maniple
