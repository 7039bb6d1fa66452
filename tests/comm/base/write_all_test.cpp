#include "comm/base/write_all.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "comm/base/files.h"
#include "comm/base/format.h"
#include "comm/base/unique_fd.h"

namespace maniple {
namespace {

std::pair<UniqueFd, UniqueFd> pipe_ends(int flags = 0) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC | flags), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::string read_to_end(int fd) {
  std::string text;
  char piece[4096];
  for (ssize_t got = 0; (got = ::read(fd, piece, sizeof piece)) > 0;) text.append(piece, static_cast<std::size_t>(got));
  return text;
}

TEST(WriteAll, WritesMoreThanAPipeHolds) {
  auto [reading, writing] = pipe_ends();
  const std::string sent(std::size_t{1} << 20, 'x');
  std::string received;
  std::thread reader([&received, fd = reading.get()] { received = read_to_end(fd); });
  EXPECT_EQ(write_all(writing.get(), sent), sent.size());
  writing.reset();
  reader.join();
  EXPECT_EQ(received, sent);
}

TEST(WriteAll, GoesOnAfterASignal) {
  struct sigaction handler{}, before{};
  handler.sa_handler = [](int) {};  // without SA_RESTART: a blocked write ends early or with EINTR
  ASSERT_EQ(::sigaction(SIGUSR1, &handler, &before), 0);
  auto [reading, writing] = pipe_ends();
  const std::string sent(std::size_t{1} << 20, 'x');
  std::string received;
  std::thread reader([&received, fd = reading.get(), writer = ::pthread_self()] {
    char piece[1024];
    for (ssize_t got = 0; (got = ::read(fd, piece, sizeof piece)) > 0;) {
      received.append(piece, static_cast<std::size_t>(got));
      ::pthread_kill(writer, SIGUSR1);
    }
  });
  EXPECT_EQ(write_all(writing.get(), sent), sent.size());
  writing.reset();
  reader.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(received, sent);
}

TEST(WriteAll, ReturnsHowMuchADescriptorTookThatDoesNotBlock) {
  auto [reading, writing] = pipe_ends(O_NONBLOCK);
  const std::string sent(std::size_t{1} << 20, 'x');
  const std::size_t done = write_all(writing.get(), sent);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_GT(done, 0u);
  EXPECT_LT(done, sent.size());
  EXPECT_EQ(write_all(writing.get(), {}), 0u);
}

TEST(WriteAll, ReportsAnErrorInErrno) {
  const UniqueFd full = open_file("/dev/full", O_WRONLY | O_CLOEXEC);
  EXPECT_EQ(write_all(full.get(), "text"), 0u);
  EXPECT_EQ(errno, ENOSPC);
}

TEST(WriteAll, WritesAtAnOffset) {
  const UniqueFd file(::memfd_create("write_all_test", MFD_CLOEXEC));
  EXPECT_EQ(write_all(file.get(), "0123456789"), 10u);
  EXPECT_EQ(write_all_at(file.get(), "abc", 4), 3u);
  EXPECT_EQ(file_text(format_text("/proc/self/fd/{}", file.get())), "0123abc789");
}

TEST(WriteAll, APeerThatIsGoneIsAnErrorAndNotASignal) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  const std::string sent(std::size_t{4} << 20, 'x');
  EXPECT_LT(send_all(ours.get(), sent, MSG_DONTWAIT), sent.size());
  EXPECT_EQ(errno, EAGAIN);
  theirs.reset();
  EXPECT_EQ(send_all(ours.get(), "more"), 0u);
  EXPECT_EQ(errno, EPIPE);
}

}  // namespace
}  // namespace maniple
