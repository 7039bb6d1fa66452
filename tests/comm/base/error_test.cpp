#include "comm/base/error_codec.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include <gtest/gtest.h>

#include "comm/base/launcher_socket.h"
#include "comm/base/unique_fd.h"

namespace maniple {
namespace {

ErrorInfo sample(ErrorKind kind = ErrorKind::peer_lost) {
  return {.kind = kind,
          .operation = "all_reduce",
          .sequence = 12,
          .arguments = {},
          .group = "world",
          .rank = 3,
          .size = 8,
          .ranks = {5, 6},
          .origin = 5,
          .waited_s = 2.125,
          .bytes_moved = 3,
          .bytes_expected = 8,
          .loss = LossKind::left_or_ended,
          .calls = {{.rank = 5, .call = "barrier #12", .place = "a.cpp:3"}, {.rank = 6, .call = "all_reduce #12"}},
          .code = 104,
          .reason = "peer 5 lost after 2.1 s: connection reset"};
}

void expect_same(const ErrorInfo& a, const ErrorInfo& b) {
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.operation, b.operation);
  EXPECT_EQ(a.sequence, b.sequence);
  EXPECT_EQ(a.arguments, b.arguments);
  EXPECT_EQ(a.group, b.group);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.size, b.size);
  EXPECT_EQ(a.ranks, b.ranks);
  EXPECT_EQ(a.origin, b.origin);
  EXPECT_EQ(a.waited_s, b.waited_s);
  EXPECT_EQ(a.bytes_moved, b.bytes_moved);
  EXPECT_EQ(a.bytes_expected, b.bytes_expected);
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.calls, b.calls);
  EXPECT_EQ(a.code, b.code);
  EXPECT_EQ(a.reason, b.reason);
}

TEST(Error, TextIsMadeFromTheFields) {
  EXPECT_STREQ(PeerLost(sample()).what(), "[all_reduce #12 world rank 3/8] peer 5 lost after 2.1 s: connection reset");
  ErrorInfo message = sample();
  message.operation = "recv";
  message.sequence = 0;
  message.arguments = "from rank 1 tag 7";
  message.reason = "why";
  EXPECT_EQ(describe(message), "[recv from rank 1 tag 7 world rank 3/8] why");
  EXPECT_STREQ(Timeout("why", {1, 2}, 3.0).what(), "why");
}

TEST(Error, ClassesKeepTheirFields) {
  EXPECT_EQ(PeerLost("why", 4).rank(), 4);
  EXPECT_EQ(PeerLost("why", -1).rank(), -1);
  EXPECT_EQ(PeerLost(sample()).rank(), 5);
  EXPECT_EQ(SystemError("why", 13).code(), 13);
  EXPECT_EQ(Timeout("why", {1, 2}, 3.0).info().ranks, (std::vector<int>{1, 2}));
  EXPECT_EQ(Timeout(sample()).kind(), ErrorKind::timeout) << "the class decides";
}

TEST(ErrorCodec, EveryKindDecodesToItselfAndToItsClass) {
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::unsupported); ++kind) {
    const ErrorInfo info = sample(static_cast<ErrorKind>(kind));
    expect_same(decode_error(encode_error(info)), info);
    expect_same(info_of(make_error(info)), info);
  }
  EXPECT_THROW(std::rethrow_exception(make_error(sample(ErrorKind::mismatch))), Mismatch);
  EXPECT_THROW(std::rethrow_exception(make_error(sample(ErrorKind::system))), SystemError);
}

TEST(ErrorCodec, LongFieldsAreCut) {
  ErrorInfo info = sample();
  info.operation.assign(10'000, 'o');
  info.arguments.assign(10'000, 'a');
  info.group.assign(10'000, 'g');
  info.ranks.assign(10'000, 1);
  info.calls.assign(10'000, {.rank = 1, .call = std::string(1000, 'c'), .place = std::string(1000, 'p')});
  info.reason.assign(1'000'000, 'r');
  EXPECT_LE(encode_error(info).size(), kMaxErrorBytes);
  const ErrorInfo cut = decode_error(encode_error(info));
  EXPECT_GE(cut.calls.size(), 20u);
  EXPECT_GE(cut.reason.size(), 20'000u);
  EXPECT_EQ(encode_error(cut), encode_error(info)) << "what is left is not cut again";
  const std::string packet = encode_report({.rank = 2, .error = info});
  EXPECT_LE(packet.size(), kMaxReportBytes);
  EXPECT_EQ(decode_report(packet).rank, 2);
  EXPECT_FALSE(decode_report(packet).error.reason.empty());
}

TEST(ErrorCodec, TruncatedAndUnknownAreRefused) {
  const std::string bytes = encode_error(sample());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(decode_error(bytes.substr(0, size)), ProtocolError) << size;
  }
  EXPECT_THROW(decode_error(bytes + '\0'), ProtocolError);
  std::string unknown = bytes;
  unknown[0] = '\10';
  EXPECT_THROW(decode_error(unknown), ProtocolError);
  ErrorInfo lost = sample();
  lost.loss = static_cast<LossKind>(4);
  EXPECT_THROW(decode_error(encode_error(lost)), ProtocolError);
}

TEST(ErrorCodec, LossesAndMismatchesKeepTheirKindAcrossRanks) {
  EXPECT_EQ(from_another_rank(sample(ErrorKind::peer_lost)).kind, ErrorKind::peer_lost);
  EXPECT_EQ(from_another_rank(sample(ErrorKind::mismatch)).kind, ErrorKind::mismatch);
  EXPECT_EQ(from_another_rank(sample(ErrorKind::timeout)).kind, ErrorKind::aborted);
  EXPECT_EQ(from_another_rank(sample(ErrorKind::timeout)).ranks, sample().ranks);
}

TEST(ErrorCodec, ForeignExceptionsKeepTheirText) {
  const ErrorInfo info = info_of(std::make_exception_ptr(std::runtime_error("why")));
  EXPECT_EQ(info.kind, ErrorKind::aborted);
  EXPECT_EQ(info.reason, "why");
}

class Report : public ::testing::Test {
 protected:
  ~Report() override {
    ::unsetenv("MANIPLE_REPORT_FD");
    ::unsetenv("RANK");
  }
  static void report_through(int fd) {
    ::setenv("MANIPLE_REPORT_FD", launcher_socket_value(fd).c_str(), 1);
    ::setenv("RANK", "6", 1);
    report_failure(sample());
  }
  static void expect_report(int fd) {
    std::string packet(kMaxReportBytes, '\0');
    const ssize_t got = ::read(fd, packet.data(), packet.size());
    ASSERT_GT(got, 0);
    const FailureReport report = decode_report(std::string_view(packet).substr(0, static_cast<std::size_t>(got)));
    EXPECT_EQ(report.rank, 6);
    expect_same(report.error, sample());
  }
};

TEST_F(Report, TravelsThroughASocket) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd here(fds[0]);
  const UniqueFd there(fds[1]);
  report_through(there.get());
  expect_report(here.get());
}

TEST_F(Report, NeverBlocks) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd here(fds[0]);
  const UniqueFd there(fds[1]);
  report_through(there.get());
  expect_report(here.get());
  for (int i = 0; i < 10000; ++i) report_failure(sample());  // more than a socket holds
}

// What a program finds that a rank started: the variable, and a file of its own under that number.
TEST_F(Report, IsNotWrittenToAnUnrelatedFileWithTheSameNumber) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd here(fds[0]);
  const int number = fds[1];
  const std::string value = launcher_socket_value(number);
  ::close(number);
  UniqueFd file(::memfd_create("of the user", MFD_CLOEXEC));
  ASSERT_EQ(::dup2(file.get(), number), number);
  const UniqueFd copy(number);
  ::setenv("RANK", "6", 1);
  for (const std::string& text : {value, std::to_string(number), std::to_string(number) + ":0", std::string("-1:5")}) {
    ::setenv("MANIPLE_REPORT_FD", text.c_str(), 1);
    report_failure(sample());
    struct stat status{};
    ASSERT_EQ(::fstat(number, &status), 0);
    EXPECT_EQ(status.st_size, 0) << text;
    EXPECT_EQ(std::getenv("MANIPLE_REPORT_FD"), nullptr) << "the variable is gone once it was looked at";
  }
}

TEST_F(Report, IsNotSentByAForkedChild) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
  const UniqueFd here(fds[0]);
  const UniqueFd there(fds[1]);
  report_through(there.get());
  expect_report(here.get());
  const pid_t child = ::fork();
  if (child == 0) {
    report_failure(sample());
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  char byte = 0;
  EXPECT_EQ(::recv(here.get(), &byte, 1, 0), -1);
}

TEST_F(Report, WithoutADescriptorDoesNothing) {
  report_failure(sample());
  report_through(1'000'000);
}

}  // namespace
}  // namespace maniple
