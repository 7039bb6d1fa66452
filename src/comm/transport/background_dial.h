// Dials a connection in a thread of its own, so that the caller need not block.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/base/system_error.h"
#include "comm/net/secure_connection.h"

namespace maniple {

class BackgroundDial {
 public:
  /// `finished` runs in the dialling thread once `done()` is true. Throws SystemError when the system refuses a thread.
  BackgroundDial(std::function<SecureConnection()> dial, std::function<void()> finished) {
    try {
      thread_ = std::thread([this, dial = std::move(dial), finished = std::move(finished)] {
        try {
          connection_ = dial();
        } catch (...) {
          error_ = std::current_exception();
        }
        done_.store(true, std::memory_order_release);
        finished();
      });
    } catch (const std::system_error& error) {
      throw_system_error("start a thread that connects to another rank", error.code().value());
    }
  }
  /// Joins the thread: abort the dial first.
  ~BackgroundDial() { thread_.join(); }
  BackgroundDial(const BackgroundDial&) = delete;
  BackgroundDial& operator=(const BackgroundDial&) = delete;

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  /// Returns the connection, or rethrows the dial's exception. Requires `done()`.
  SecureConnection take() {
    if (error_) std::rethrow_exception(error_);
    return std::move(connection_);
  }

 private:
  SecureConnection connection_;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
  std::thread thread_;  // last: it uses the members above
};

}  // namespace maniple
