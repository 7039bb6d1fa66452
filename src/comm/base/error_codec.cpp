#include "comm/base/error_codec.h"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "comm/base/codec.h"
#include "comm/base/launcher_socket.h"

namespace maniple {
namespace {

constexpr std::size_t kMaxOperation = 64;
constexpr std::size_t kMaxArguments = 128;
constexpr std::size_t kMaxGroup = 1024;
constexpr std::size_t kMaxRanks = 256;
constexpr std::size_t kMaxCall = 256;
constexpr std::size_t kMaxPlace = 512;
constexpr std::size_t kMaxCallsBytes = 20 * 1024;  // of all calls; under half of kMaxErrorBytes less the other fields

void put(ByteWriter& writer, std::string_view text, std::size_t limit) { writer.put_string(text.substr(0, limit)); }

/// Writes the calls that fit into `limit` bytes.
void put_calls(ByteWriter& writer, const std::vector<RankCall>& calls, std::size_t limit) {
  ByteWriter list;
  std::uint32_t count = 0;
  for (const RankCall& call : calls) {
    ByteWriter next;
    next.put(std::int32_t{call.rank});
    put(next, call.call, kMaxCall);
    put(next, call.place, kMaxPlace);
    if (list.bytes().size() + next.bytes().size() > limit) break;
    list.put_raw(next.bytes());
    ++count;
  }
  writer.put(count);
  writer.put_raw(list.bytes());
}

std::vector<RankCall> get_calls(ByteReader& reader) {
  std::vector<RankCall> calls;
  const auto count = reader.get<std::uint32_t>();
  const std::size_t before = reader.left();
  for (std::uint32_t i = 0; i < count; ++i) {
    RankCall call;
    call.rank = reader.get<std::int32_t>();
    call.call = reader.get_string(kMaxCall);
    call.place = reader.get_string(kMaxPlace);
    if (before - reader.left() > kMaxCallsBytes) throw ProtocolError("an error with too many calls");
    calls.push_back(std::move(call));
  }
  return calls;
}

/// A number in a variable set by a launcher; -1 if there is none.
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
  writer.put(info.bytes_moved);
  writer.put(info.bytes_expected);
  writer.put(info.loss);
  writer.put(std::int32_t{info.code});
  put_calls(writer, info.calls, std::min(kMaxCallsBytes, (limit - writer.bytes().size()) / 2));
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
  info.bytes_moved = reader.get<std::uint64_t>();
  info.bytes_expected = reader.get<std::uint64_t>();
  const auto loss = reader.get<std::uint8_t>();
  if (loss > static_cast<std::uint8_t>(LossKind::left_or_ended))
    throw ProtocolError("a loss of unknown kind " + std::to_string(loss));
  info.loss = static_cast<LossKind>(loss);
  info.code = reader.get<std::int32_t>();
  info.calls = get_calls(reader);
  info.reason = reader.get_string(kMaxErrorBytes);
  reader.expect_end();
  if (bytes.size() > kMaxErrorBytes) throw ProtocolError("an error of " + std::to_string(bytes.size()) + " bytes");
  return info;
}

ErrorInfo from_another_rank(ErrorInfo info) {
  if (info.kind != ErrorKind::peer_lost && info.kind != ErrorKind::mismatch) info.kind = ErrorKind::aborted;
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

std::exception_ptr with_context(const ErrorInfo& context, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument&) {
    return error;
  } catch (const Unsupported&) {
    return error;
  } catch (const Error& e) {
    ErrorInfo info = e.info();
    if (!info.operation.empty()) info.reason = e.what();
    info.operation = context.operation;
    info.sequence = context.sequence;
    info.arguments = context.arguments;
    info.group = context.group;
    info.rank = context.rank;
    info.size = context.size;
    if (info.origin < 0) info.origin = context.origin;
    return make_error(std::move(info));
  } catch (...) {
    return error;
  }
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
  const int fd = launcher_socket(kReportSocket);
  if (fd < 0) return;
  try {
    const std::string packet = encode_report({.rank = number_of("RANK"), .error = error});
    ::send(fd, packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  } catch (...) {  // out of memory: the launcher still sees how the process ends
  }
}

}  // namespace maniple
