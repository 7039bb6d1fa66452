// Work: a handle to an operation, returned by collectives, isend and irecv.
//
//   Work work = group->all_reduce(buffer_of(gradients), ReduceOp::sum, {.async_op = true});
//   ...                        // the group's own thread communicates meanwhile
//   work.wait();               // returns when the result is in place; throws what went wrong
//
// Operations of one group run in the order of the calls, on every rank.
//
// Lifetime: copies of a handle refer to the same operation. Dropping the last handle neither waits nor cancels.
//
// Threads: all methods may be called from any thread.
//
// GPU memory: when the call returns, the operation is *enqueued*; it is *complete* later. wait() does not block the
// host but orders the caller's current stream after the operation. synchronize() blocks the host until the operation is
// complete. If an operation fails after it was enqueued, its results are undefined, and the next call on the host
// throws the error: wait, synchronize, or the next operation.
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include <maniple/comm/deadline.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

namespace detail {
struct WorkState;
}  // namespace detail

class Work {
 public:
  /// An empty handle: only assignment and valid() may be used.
  Work() = default;
  bool valid() const noexcept { return state_ != nullptr; }

  /// True once the operation has succeeded or failed.
  bool done() const;

  /// Blocks until the operation is done; rethrows its error. Always returns, because the operation has its own
  /// deadline. On GPU memory it returns at once: work enqueued later on this thread's current stream runs after the
  /// operation.
  void wait() const;

  /// Blocks the host until the operation is complete, also on GPU memory; rethrows its error.
  void synchronize() const;

  /// Blocks the host until the operation is done or the deadline passes; returns whether it is done. Rethrows the
  /// operation's error. A passed deadline is not an error and does not affect the operation.
  bool wait_until(Deadline deadline) const;

  /// The operation's error; null while it runs and after success.
  std::exception_ptr error() const;

  /// Runs `next` once the operation is done: at once in the calling thread if it is already done, otherwise in the
  /// thread that finishes it. The returned Work is done when `next` has returned, and carries what `next` threw. If the
  /// operation fails, `next` does not run and the returned Work carries the operation's error. `next` must not block on
  /// operations of the same group.
  Work then(std::function<void()> next) const;

  explicit Work(std::shared_ptr<detail::WorkState> state)  ///< internal
      : state_(std::move(state)) {}
  const std::shared_ptr<detail::WorkState>& state() const noexcept { return state_; }  ///< internal

 private:
  std::shared_ptr<detail::WorkState> state_;
};

}  // namespace maniple
