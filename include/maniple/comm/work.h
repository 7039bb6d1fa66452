// A handle to an operation: what collectives, isend and irecv return.
//
//   Work work = group->all_reduce(buffer_of(gradients), ReduceOp::sum, {.async_op = true});
//   ...                        // the group's own thread communicates meanwhile
//   work.wait();               // returns when the result is in place; throws what went wrong
//
// Operations of one group run in the order in which they were called, on every rank. A handle may be copied; all
// copies are the same operation. Dropping the last handle neither waits nor cancels. All methods may be called from
// any thread.
//
// On memory of a device (a GPU) an operation is *enqueued* when the call returns, and *complete* later. wait() does not
// block the host there: it orders the caller's current stream after the operation. synchronize() blocks the host until
// it is complete. An operation that fails after it was enqueued leaves values that mean nothing; the error is thrown by
// the next call on the host: wait, synchronize, or the next operation.
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include <maniple/comm/deadline.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

namespace detail {
struct WorkState;
struct WorkAccess;
}  // namespace detail

class Work {
 public:
  /// A handle to nothing; only assignment and `valid` may be used.
  Work() = default;
  bool valid() const noexcept { return state_ != nullptr; }

  /// True once the operation has succeeded or failed.
  bool done() const;

  /// Blocks until done; rethrows the operation's error. (The operation has a deadline of its own, so this ends.) On a
  /// device: what is enqueued from now on, on the current stream of this thread, comes after the operation; the host
  /// goes on at once.
  void wait() const;

  /// Blocks the host until the operation is complete, also on a device; rethrows its error.
  void synchronize() const;

  /// Blocks the host until done or until the deadline; true when done. Rethrows the operation's error. That the
  /// deadline of this wait passes is no error and does not disturb the operation.
  bool wait_until(Deadline deadline) const;

  /// The error, or null while running and after success.
  std::exception_ptr error() const;

  /// Runs `next` once the operation is done: at once in the calling thread if it is done already, otherwise in the
  /// thread that finishes it. The returned Work is done when `next` has returned; it carries the error of the
  /// operation, in which case `next` is not run, or what `next` threw. `next` must not block on operations of the same
  /// group.
  Work then(std::function<void()> next) const;

  explicit Work(std::shared_ptr<detail::WorkState> state)  ///< internal
      : state_(std::move(state)) {}

 private:
  friend struct detail::WorkAccess;
  std::shared_ptr<detail::WorkState> state_;
};

}  // namespace maniple
