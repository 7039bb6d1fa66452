// Errors between processes: a bounded encoding of ErrorInfo, and the report by which a worker sends its failure to the
// launcher.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include <maniple/comm/error.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

inline constexpr std::size_t kMaxErrorBytes = 48 * 1024;
inline constexpr std::size_t kMaxReportBytes = 4096;  ///< PIPE_BUF: a write to a pipe of this size is atomic

/// Encodes into at most `limit` bytes (at least 4096). Truncates the reason and the lists of ranks and calls to fit.
std::string encode_error(const ErrorInfo& info, std::size_t limit = kMaxErrorBytes);
inline std::string encode_error(const Error& error) { return encode_error(error.info()); }

/// Decodes exactly `bytes`. Throws ProtocolError. Never allocates more than a small multiple of the input size.
ErrorInfo decode_error(std::string_view bytes);

/// Converts an error reported by another group member to the error this rank throws: PeerLost and Mismatch are the same
/// on every rank, all other kinds become Aborted.
ErrorInfo from_another_rank(ErrorInfo info);

/// An exception of the class that matches `info.kind`.
std::exception_ptr make_error(ErrorInfo info);

/// The fields of an exception. A foreign exception becomes `aborted`, with its text as the reason.
ErrorInfo info_of(const std::exception_ptr& error);

/// The same error, attributed to the call that `context` names (operation to size, and origin). The text of another
/// call's error becomes the reason. InvalidArgument and Unsupported are returned unchanged.
std::exception_ptr with_context(const ErrorInfo& context, const std::exception_ptr& error);

/// Sent by a worker to the launcher, in one packet, when a group fails (the first failure of each group) or when init()
/// fails: see report_failure. The launcher keeps the report from which later ones follow, in case the worker ends.
struct FailureReport {
  int rank = -1;  ///< RANK of the worker: its rank in the launcher's world
  ErrorInfo error = {};
};
std::string encode_report(const FailureReport& report);  ///< at most kMaxReportBytes
FailureReport decode_report(std::string_view packet);    ///< throws ProtocolError

/// Sends a FailureReport through the launcher's socket (launcher_socket.h). Never blocks and never throws: a report
/// that cannot be sent at once is dropped. Does nothing if no launcher gave this process a socket.
void report_failure(const ErrorInfo& error) noexcept;

}  // namespace maniple
