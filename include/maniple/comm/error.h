// Errors: one small tree.
//
// Every failure that Maniple reports is an exception derived from `Error`. There are two families:
//
//   the caller's mistakes      InvalidArgument, Unsupported           nothing was done, the group stays usable
//   what happened to the job   Timeout, PeerLost, Aborted, Mismatch,  the group is aborted: every later call on
//                              ProtocolError, SystemError             it throws `Aborted`, naming this first cause
//
// The text says who, with whom, how far, how long and what to do next, in one line:
//
//   [all_reduce #12 world rank 3/8] peer 5 lost after 2.1 s, 3 of 8 MiB received: connection reset
//
// Errors are immutable and may be copied between threads.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace maniple {

enum class ErrorKind : std::uint8_t {
  invalid_argument,
  timeout,
  peer_lost,
  aborted,
  mismatch,
  protocol,
  system,
  unsupported,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// The caller passed something that can never work: a root outside the group, a null buffer, a dtype the operation
/// has no meaning for. Thrown before anything is sent.
struct InvalidArgument : Error {
  explicit InvalidArgument(const std::string& text) : Error(ErrorKind::invalid_argument, text) {}
};

/// The operation's deadline passed. The text names the ranks that were still awaited.
struct Timeout : Error {
  explicit Timeout(const std::string& text) : Error(ErrorKind::timeout, text) {}
};

/// Another rank's process ended, stopped or became unreachable.
struct PeerLost : Error {
  PeerLost(const std::string& text, int rank) : Error(ErrorKind::peer_lost, text), rank_(rank) {}
  /// The lost rank, counted in the world (not in the sub-group); -1 when it could not be told.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// The group had failed before this call, or was aborted by someone. The text repeats the first cause.
struct Aborted : Error {
  explicit Aborted(const std::string& text) : Error(ErrorKind::aborted, text) {}
};

/// Ranks called different things: another operation, dtype, count, root, reduce op or order.
struct Mismatch : Error {
  explicit Mismatch(const std::string& text) : Error(ErrorKind::mismatch, text) {}
};

/// A peer sent bytes that this library would never send: wrong version, bad checksum, impossible length.
struct ProtocolError : Error {
  explicit ProtocolError(const std::string& text) : Error(ErrorKind::protocol, text) {}
};

/// The operating system refused something. The text holds the call and the reason.
struct SystemError : Error {
  SystemError(const std::string& text, int code) : Error(ErrorKind::system, text), code_(code) {}
  int code() const noexcept { return code_; }  ///< the errno

 private:
  int code_;
};

/// This build or backend cannot do it; the text says what can.
struct Unsupported : Error {
  explicit Unsupported(const std::string& text) : Error(ErrorKind::unsupported, text) {}
};

/// The name of the class, for logs: "PeerLost".
const char* to_string(ErrorKind kind) noexcept;

}  // namespace maniple
