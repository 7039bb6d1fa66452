// A point-to-point message in transit; send, recv, isend and irecv are built on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include <maniple/comm/deadline.h>
#include <maniple/comm/types.h>

namespace maniple {

struct Message {
  Op op = Op::send;  ///< send or recv
  int peer = 0;      ///< rank in the group; kAnySource for recv
  int tag = 0;
  DType dtype = DType::uint8;
  std::byte* data = nullptr;  ///< only read when sending
  std::size_t bytes = 0;
  Deadline deadline;
  Deadline::Clock::time_point since{};              ///< when it was posted
  std::shared_ptr<const std::atomic<int>> waiters;  ///< number of waiting threads; null: the call itself waits
  std::function<void()> finished;                   ///< runs once, outside all locks, when done (may be empty)

  std::unique_ptr<std::byte[]> copy;  ///< of a send already reported as done: `data` points into it

  // The MessageEngine sets these, in this order.
  int source = -1;
  std::size_t moved = 0;  ///< bytes moved so far, for error texts
  std::exception_ptr error;
  std::atomic<bool> done{false};
  bool asleep = false;  ///< the thread that drives it sleeps; guarded by the MessageEngine's lock
};

/// Unfinished messages that a thread waits for.
struct AwaitedMessages {
  std::shared_ptr<const Message> oldest;  ///< null: none
  int more = 0;
};

}  // namespace maniple
