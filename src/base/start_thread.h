// std::thread that says what it was for when the system has no more threads: its own exception is the bare text of errno.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/system_error.h"

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

}  // namespace maniple
