#include "base/error_codec.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>

#include "base/codec.h"

namespace maniple {
namespace {

constexpr std::size_t kMaxOperation = 64;
constexpr std::size_t kMaxArguments = 128;
constexpr std::size_t kMaxGroup = 1024;
constexpr std::size_t kMaxRanks = 256;

void put(ByteWriter& writer, std::string_view text, std::size_t limit) { writer.put_string(text.substr(0, limit)); }

/// A number of the environment that a launcher set; -1: there is none.
int number_of(const char* name) noexcept {
  const char* text = std::getenv(name);
  if (text == nullptr || *text < '0' || *text > '9') return -1;
  return std::atoi(text);
}

}  // namespace

std::string encode_error(const ErrorInfo& info, std::size_t limit) {
  ByteWriter writer;
  writer.put(info.kind);
  put(writer, info.operation, kMaxOperation);
  writer.put(info.sequence);
  put(writer, info.arguments, kMaxArguments);
  put(writer, info.group, kMaxGroup);
  writer.put(std::int32_t{info.rank});
  writer.put(std::int32_t{info.size});
  const auto ranks = static_cast<std::uint32_t>(std::min(info.ranks.size(), kMaxRanks));
  writer.put(ranks);
  for (std::uint32_t i = 0; i < ranks; ++i) writer.put(std::int32_t{info.ranks[i]});
  writer.put(std::int32_t{info.origin});
  writer.put(std::bit_cast<std::uint64_t>(info.waited_s));
  writer.put(std::int32_t{info.code});
  put(writer, info.reason, limit - writer.bytes().size() - sizeof(std::uint32_t));
  return writer.take();
}

ErrorInfo decode_error(std::string_view bytes) {
  ByteReader reader(bytes);
  ErrorInfo info;
  const auto kind = reader.get<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(ErrorKind::unsupported))
    throw ProtocolError("an error of unknown kind " + std::to_string(kind));
  info.kind = static_cast<ErrorKind>(kind);
  info.operation = reader.get_string(kMaxOperation);
  info.sequence = reader.get<std::uint64_t>();
  info.arguments = reader.get_string(kMaxArguments);
  info.group = reader.get_string(kMaxGroup);
  info.rank = reader.get<std::int32_t>();
  info.size = reader.get<std::int32_t>();
  const auto ranks = reader.get<std::uint32_t>();
  if (ranks > kMaxRanks) throw ProtocolError("an error that names " + std::to_string(ranks) + " ranks");
  for (std::uint32_t i = 0; i < ranks; ++i) info.ranks.push_back(reader.get<std::int32_t>());
  info.origin = reader.get<std::int32_t>();
  info.waited_s = std::bit_cast<double>(reader.get<std::uint64_t>());
  info.code = reader.get<std::int32_t>();
  info.reason = reader.get_string(kMaxErrorBytes);
  reader.expect_end();
  if (bytes.size() > kMaxErrorBytes) throw ProtocolError("an error of " + std::to_string(bytes.size()) + " bytes");
  return info;
}

std::exception_ptr make_error(ErrorInfo info) {
  switch (info.kind) {
    case ErrorKind::invalid_argument: return std::make_exception_ptr(InvalidArgument(std::move(info)));
    case ErrorKind::timeout: return std::make_exception_ptr(Timeout(std::move(info)));
    case ErrorKind::peer_lost: return std::make_exception_ptr(PeerLost(std::move(info)));
    case ErrorKind::aborted: return std::make_exception_ptr(Aborted(std::move(info)));
    case ErrorKind::mismatch: return std::make_exception_ptr(Mismatch(std::move(info)));
    case ErrorKind::protocol: return std::make_exception_ptr(ProtocolError(std::move(info)));
    case ErrorKind::system: return std::make_exception_ptr(SystemError(std::move(info)));
    case ErrorKind::unsupported: return std::make_exception_ptr(Unsupported(std::move(info)));
  }
  return std::make_exception_ptr(Aborted(std::move(info)));
}

ErrorInfo info_of(const std::exception_ptr& error) {
  ErrorInfo info;
  if (!error) {
    info.reason = "no error";
    return info;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.info();
  } catch (const std::exception& e) {
    info.reason = e.what();
  } catch (...) {
    info.reason = "an exception of unknown type";
  }
  return info;
}

std::string encode_report(const FailureReport& report) {
  ByteWriter writer;
  writer.put(std::int32_t{report.rank});
  writer.put_raw(encode_error(report.error, kMaxReportBytes - sizeof(std::int32_t)));
  return writer.take();
}

FailureReport decode_report(std::string_view packet) {
  ByteReader reader(packet);
  FailureReport report;
  report.rank = reader.get<std::int32_t>();
  report.error = decode_error(reader.get_raw(reader.left()));
  return report;
}

void report_failure(const ErrorInfo& error) noexcept {
  const int fd = number_of("MANIPLE_REPORT_FD");
  if (fd < 0) return;
  try {
    const std::string packet = encode_report({.rank = number_of("RANK"), .error = error});
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // not for this process's own children
    if (::send(fd, packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno != ENOTSOCK) return;
    // A pipe, which other processes may share: it is non-blocking for this write only.
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return;
    [[maybe_unused]] const ssize_t written = ::write(fd, packet.data(), packet.size());
    ::fcntl(fd, F_SETFL, flags);
  } catch (...) {  // no memory: the launcher still sees how the process ends
  }
}

}  // namespace maniple
