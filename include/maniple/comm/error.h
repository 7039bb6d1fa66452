// Errors: every failure that Maniple reports is an exception derived from `Error`.
//
//   catch (const maniple::Error& error) {
//     if (error.kind() == maniple::ErrorKind::peer_lost) drop(error.info().ranks);
//   }
//
// There are two families:
//
//   the caller's mistakes      InvalidArgument, Unsupported           nothing was done, the group stays usable
//   what happened to the job   Timeout, PeerLost, Aborted, Mismatch,  the group is aborted: every later call on
//                              ProtocolError, SystemError             it throws `Aborted`, naming this first cause
//
// The text is one line: the operation, the ranks, the progress and the time waited where known, and what to do next:
//
//   [all_reduce #12 world rank 3/8] rank 5 (pid 4711 on node2) is lost: its process ended without leaving the group
//   (...)
//
// The text is built from the fields of `ErrorInfo`. Programs should read the fields: texts may change from release to
// release, fields do not.
//
// Threads: errors are immutable and may be copied between threads.
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

/// How a rank was lost, as far as known.
enum class LossKind : std::uint8_t {
  unknown,
  failed,         ///< its process ended without leaving the group, is stopped, or cannot be reached
  left,           ///< it left in good order: it destroyed the group
  left_or_ended,  ///< its connection closed; over a network, leaving and ending look alike
};

/// One rank's call, in a Mismatch.
struct RankCall {
  int rank = -1;          ///< global rank
  std::string call = {};  ///< "all_reduce #12 float32[1000] sum"
  /// Where the program made the call: "train.cpp:40". If the library made the call for the program: "in
  /// Checkpoint::save, which all ranks call (train.cpp:40)". Empty: unknown.
  std::string place = {};
  friend bool operator==(const RankCall&, const RankCall&) = default;
};

/// The contents of an error as data. Fields that do not apply keep their defaults.
struct ErrorInfo {
  ErrorKind kind = ErrorKind::aborted;
  std::string operation = {};  ///< "all_reduce", "recv", "init", "new_group", ...; empty: outside any group
  std::uint64_t sequence = 0;  ///< number of the operation in its group, from 1; 0: not numbered
  std::string arguments = {};  ///< send and recv only: "from rank 1 tag 7"
  std::string group = {};      ///< "world", "world/2", ...
  int rank = -1;               ///< this rank's number in the group
  int size = 0;                ///< number of ranks in the group
  /// Global ranks. PeerLost: the lost ones; Timeout: the missing ones; Mismatch of counts: both ranks.
  std::vector<int> ranks = {};
  int origin = -1;                    ///< global rank where the failure began, or was first noticed; -1: unknown
  double waited_s = 0;                ///< seconds waited before giving up, where known
  std::uint64_t bytes_moved = 0;      ///< bytes sent or received so far, in the transfers that were not complete
  std::uint64_t bytes_expected = 0;   ///< total bytes of these transfers; 0: unknown, or none were awaited
  LossKind loss = LossKind::unknown;  ///< PeerLost only
  std::vector<RankCall> calls = {};   ///< Mismatch: the calls of the ranks that reported theirs; a long list is cut
  int code = 0;                       ///< SystemError: errno
  std::string reason = {};            ///< the text without the bracketed prefix
};

/// The error text: "[all_reduce #12 world rank 3/8] " followed by the reason.
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

/// The caller passed something that can never work: a root outside the group, a null buffer, a dtype the operation does
/// not support. Thrown before anything is sent.
struct InvalidArgument : Error {
  explicit InvalidArgument(const std::string& reason) : Error(ErrorKind::invalid_argument, reason) {}
  explicit InvalidArgument(ErrorInfo info) : Error(with_kind(ErrorKind::invalid_argument, std::move(info))) {}
};

/// The operation's deadline passed. The text and `info().ranks` name the missing ranks.
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
  /// The global rank (not the group rank) that was lost; -1 if unknown.
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

/// The group had failed before this call, or was aborted explicitly. The text repeats the first cause.
struct Aborted : Error {
  explicit Aborted(const std::string& reason) : Error(ErrorKind::aborted, reason) {}
  explicit Aborted(ErrorInfo info) : Error(with_kind(ErrorKind::aborted, std::move(info))) {}
};

/// Ranks made different calls: another operation, dtype, count, root, reduce op or order. `info().calls` lists them.
struct Mismatch : Error {
  explicit Mismatch(const std::string& reason) : Error(ErrorKind::mismatch, reason) {}
  explicit Mismatch(ErrorInfo info) : Error(with_kind(ErrorKind::mismatch, std::move(info))) {}
};

/// A peer sent bytes that this library never sends: wrong version, bad checksum, impossible length.
struct ProtocolError : Error {
  explicit ProtocolError(const std::string& reason) : Error(ErrorKind::protocol, reason) {}
  explicit ProtocolError(ErrorInfo info) : Error(with_kind(ErrorKind::protocol, std::move(info))) {}
};

/// The operating system refused a request. The text holds the call and the reason.
struct SystemError : Error {
  SystemError(const std::string& reason, int code) : Error(make_code(reason, code)) {}
  explicit SystemError(ErrorInfo info) : Error(with_kind(ErrorKind::system, std::move(info))) {}
  int code() const noexcept { return info().code; }  ///< errno

 private:
  static ErrorInfo make_code(const std::string& reason, int code) {
    ErrorInfo info = make(ErrorKind::system, reason);
    info.code = code;
    return info;
  }
};

/// This build or backend cannot do it; the text names what can.
struct Unsupported : Error {
  explicit Unsupported(const std::string& reason) : Error(ErrorKind::unsupported, reason) {}
  explicit Unsupported(ErrorInfo info) : Error(with_kind(ErrorKind::unsupported, std::move(info))) {}
};

/// The class name, for logs: "PeerLost".
const char* to_string(ErrorKind kind) noexcept;

}  // namespace maniple
