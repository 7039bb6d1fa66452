// Errors between processes: one bounded encoding of ErrorInfo, and how a worker reports its failure to whoever started
// it.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include <maniple/comm/error.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

inline constexpr std::size_t kMaxErrorBytes = 48 * 1024;
inline constexpr std::size_t kMaxReportBytes = 4096;  ///< PIPE_BUF: one write to a pipe is whole or not at all

/// At most `limit` bytes (not less than 4096): what is too long of the reason, and of the lists of ranks and calls, is
/// cut off.
std::string encode_error(const ErrorInfo& info, std::size_t limit = kMaxErrorBytes);
inline std::string encode_error(const Error& error) { return encode_error(error.info()); }

/// Of all of `bytes`. Throws ProtocolError. Never allocates more than a small multiple of what it is given.
ErrorInfo decode_error(std::string_view bytes);

/// What an error that another rank reports of a group is on this one: what happened to a peer and what ranks disagree
/// about is the same everywhere, all else is an abort.
ErrorInfo from_another_rank(ErrorInfo info);

/// An exception of the class that belongs to `info.kind`.
std::exception_ptr make_error(ErrorInfo info);

/// The fields of an exception. One that is not of Maniple becomes `aborted`, with its text as the reason.
ErrorInfo info_of(const std::exception_ptr& error);

/// What a worker sends to the launcher, in one packet, when one of its groups fails (the first failure of each group)
/// or when init() fails: see report_failure. The launcher keeps the last one for the case that the worker then ends.
struct FailureReport {
  int rank = -1;  ///< RANK of the worker, that is: in the world of the launcher
  ErrorInfo error = {};
};
std::string encode_report(const FailureReport& report);  ///< at most kMaxReportBytes
FailureReport decode_report(std::string_view packet);    ///< throws ProtocolError

/// Sends a FailureReport through the launcher's socket (launcher_socket.h). Never blocks and never throws: a report
/// that cannot be sent at once is dropped. Does nothing where no launcher gave this process a socket.
void report_failure(const ErrorInfo& error) noexcept;

}  // namespace maniple
