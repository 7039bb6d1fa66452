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
//   [all_reduce #12 world rank 3/8] rank 5 (pid 4711 on node2) is lost: its process ended without leaving the group
//   (...)
//
// It is made from the fields of `ErrorInfo`, which programs read instead of the text:
//
//   catch (const maniple::Error& error) {
//     if (error.kind() == maniple::ErrorKind::peer_lost) drop(error.info().ranks);
//   }
//
// Texts may change from release to release; fields do not.
//
// Errors are immutable and may be copied between threads.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

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

/// How a rank was lost, as far as that is known.
enum class LossKind : std::uint8_t {
  unknown,
  failed,         ///< its process ended without leaving the group, is stopped, or cannot be reached
  left,           ///< it left in good order: it destroyed the group
  left_or_ended,  ///< its connection was closed: over a network a rank that leaves and one that ends look alike
};

/// One rank's call, where ranks called different things.
struct RankCall {
  int rank = -1;          ///< counted in the world
  std::string call = {};  ///< "all_reduce #12 float32[1000] sum"
  /// Where the program made it: "train.cpp:40". Where the library made it for the program: "in Checkpoint::save, which
  /// all ranks call (train.cpp:40)". Empty: not known.
  std::string place = {};
  friend bool operator==(const RankCall&, const RankCall&) = default;
};

/// All that an error says, as data. Fields that do not apply keep their defaults.
struct ErrorInfo {
  ErrorKind kind = ErrorKind::aborted;
  std::string operation = {};         ///< "all_reduce", "recv", "init", "new_group", ...; empty: outside any group
  std::uint64_t sequence = 0;         ///< number of the operation in its group, from 1; 0: not numbered
  std::string arguments = {};         ///< of send and recv: "from rank 1 tag 7"
  std::string group = {};             ///< "world", "world/2", ...
  int rank = -1;                      ///< this rank in the group
  int size = 0;                       ///< ranks of the group
  std::vector<int> ranks = {};        ///< in the world. PeerLost: lost; Timeout: missing; Mismatch: both, of a count
  int origin = -1;                    ///< the rank of the world on which it began, or was noticed first; -1: not known
  double waited_s = 0;                ///< seconds until it was given up, where known
  std::uint64_t bytes_moved = 0;      ///< of the transfers that were not complete: sent or received so far,
  std::uint64_t bytes_expected = 0;   ///< of so many; 0: not known, or no bytes were awaited
  LossKind loss = LossKind::unknown;  ///< PeerLost: how
  std::vector<RankCall> calls = {};   ///< Mismatch: what the ranks called, as far as they said; a long list is cut
  int code = 0;                       ///< SystemError: the errno
  std::string reason = {};            ///< the text without what stands in brackets before it
};

/// The text of an error: "[all_reduce #12 world rank 3/8] " and the reason.
std::string describe(const ErrorInfo& info);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& reason) : Error(make(kind, reason)) {}
  explicit Error(ErrorInfo info)
      : std::runtime_error(describe(info)), info_(std::make_shared<const ErrorInfo>(std::move(info))) {}

  ErrorKind kind() const noexcept { return info_->kind; }
  const ErrorInfo& info() const noexcept { return *info_; }

 protected:
  static ErrorInfo make(ErrorKind kind, std::string reason) {
    ErrorInfo info;
    info.kind = kind;
    info.reason = std::move(reason);
    return info;
  }
  static ErrorInfo with_kind(ErrorKind kind, ErrorInfo info) {
    info.kind = kind;
    return info;
  }

 private:
  std::shared_ptr<const ErrorInfo> info_;  // shared, so that copying does not throw
};

/// The caller passed something that can never work: a root outside the group, a null buffer, a dtype the operation
/// has no meaning for. Thrown before anything is sent.
struct InvalidArgument : Error {
  explicit InvalidArgument(const std::string& reason) : Error(ErrorKind::invalid_argument, reason) {}
  explicit InvalidArgument(ErrorInfo info) : Error(with_kind(ErrorKind::invalid_argument, std::move(info))) {}
};

/// The operation's deadline passed. The text, and `info().ranks`, name the ranks that were still awaited.
struct Timeout : Error {
  explicit Timeout(const std::string& reason) : Error(ErrorKind::timeout, reason) {}
  Timeout(const std::string& reason, std::vector<int> missing, double waited_s)
      : Error(make_missing(reason, std::move(missing), waited_s)) {}
  explicit Timeout(ErrorInfo info) : Error(with_kind(ErrorKind::timeout, std::move(info))) {}

 private:
  static ErrorInfo make_missing(const std::string& reason, std::vector<int> missing, double waited_s) {
    ErrorInfo info = make(ErrorKind::timeout, reason);
    info.ranks = std::move(missing);
    info.waited_s = waited_s;
    return info;
  }
};

/// Another rank's process ended, stopped or became unreachable.
struct PeerLost : Error {
  PeerLost(const std::string& reason, int rank, LossKind loss = LossKind::unknown)
      : Error(make_lost(reason, rank, loss)) {}
  explicit PeerLost(ErrorInfo info) : Error(with_kind(ErrorKind::peer_lost, std::move(info))) {}
  /// The lost rank, counted in the world (not in the sub-group); -1 when it is not known.
  int rank() const noexcept { return info().ranks.empty() ? -1 : info().ranks.front(); }

 private:
  static ErrorInfo make_lost(const std::string& reason, int rank, LossKind loss) {
    ErrorInfo info = make(ErrorKind::peer_lost, reason);
    info.loss = loss;
    if (rank >= 0) info.ranks = {rank};
    info.origin = rank;
    return info;
  }
};

/// The group had failed before this call, or was aborted by someone. The text repeats the first cause.
struct Aborted : Error {
  explicit Aborted(const std::string& reason) : Error(ErrorKind::aborted, reason) {}
  explicit Aborted(ErrorInfo info) : Error(with_kind(ErrorKind::aborted, std::move(info))) {}
};

/// Ranks called different things: another operation, dtype, count, root, reduce op or order. `info().calls` says what.
struct Mismatch : Error {
  explicit Mismatch(const std::string& reason) : Error(ErrorKind::mismatch, reason) {}
  explicit Mismatch(ErrorInfo info) : Error(with_kind(ErrorKind::mismatch, std::move(info))) {}
};

/// A peer sent bytes that this library would never send: wrong version, bad checksum, impossible length.
struct ProtocolError : Error {
  explicit ProtocolError(const std::string& reason) : Error(ErrorKind::protocol, reason) {}
  explicit ProtocolError(ErrorInfo info) : Error(with_kind(ErrorKind::protocol, std::move(info))) {}
};

/// The operating system refused something. The text holds the call and the reason.
struct SystemError : Error {
  SystemError(const std::string& reason, int code) : Error(make_code(reason, code)) {}
  explicit SystemError(ErrorInfo info) : Error(with_kind(ErrorKind::system, std::move(info))) {}
  int code() const noexcept { return info().code; }  ///< the errno

 private:
  static ErrorInfo make_code(const std::string& reason, int code) {
    ErrorInfo info = make(ErrorKind::system, reason);
    info.code = code;
    return info;
  }
};

/// This build or backend cannot do it; the text says what can.
struct Unsupported : Error {
  explicit Unsupported(const std::string& reason) : Error(ErrorKind::unsupported, reason) {}
  explicit Unsupported(ErrorInfo info) : Error(with_kind(ErrorKind::unsupported, std::move(info))) {}
};

/// The name of the class, for logs: "PeerLost".
const char* to_string(ErrorKind kind) noexcept;

}  // namespace maniple
