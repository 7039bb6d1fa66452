#include "comm/base/unique_fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>

#include <fmt/format.h>

#include "comm/base/system_error.h"

namespace maniple {
namespace {

// One bit per descriptor number. Children inherit descriptors beyond the table; a process has at most a million, unless
// an administrator raised fs.nr_open.
constexpr int kNumbers = 1 << 20;
constexpr int kBits = 64;
constinit std::array<std::atomic<std::uint64_t>, kNumbers / kBits> kept;
constinit std::atomic<int> kept_words{0};  // words from this index on are zero

std::uint64_t bit_of(int fd) noexcept { return std::uint64_t{1} << (fd % kBits); }
std::atomic<std::uint64_t>& word_of(int fd) noexcept { return kept[fd / kBits]; }

// Uses only system calls, because other threads of the parent may hold any lock. A descriptor that is open but not yet
// marked when another thread forks is inherited; avoiding that is not worth a lock.
void replace_in_child() {
  const int words = kept_words.load(std::memory_order_relaxed);
  int closed = -1;
  for (int word = 0; word < words; ++word) {
    std::uint64_t bits = kept[word].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) {
      const int fd = word * kBits + std::countr_zero(bits);
      if (closed >= 0) {
        ::dup3(closed, fd, O_CLOEXEC);
        continue;
      }
      // Close the first descriptor and reuse its number for the socket, so that this works at the limit of open files.
      ::close(fd);
      closed = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      if (closed >= 0 && closed != fd) {
        ::dup3(closed, fd, O_CLOEXEC);
        ::close(closed);
        closed = fd;
      }
    }
  }
}

}  // namespace

UniqueFd kept_from_children(UniqueFd fd) noexcept {
  static const int watched = ::pthread_atfork(nullptr, nullptr, replace_in_child);
  (void)watched;
  const int number = fd.get();
  if (number < 0 || number >= kNumbers) return fd;
  word_of(number).fetch_or(bit_of(number), std::memory_order_relaxed);
  for (int seen = kept_words.load(std::memory_order_relaxed), mine = number / kBits + 1;
       seen < mine && !kept_words.compare_exchange_weak(seen, mine, std::memory_order_relaxed);) {
  }
  return fd;
}

int UniqueFd::release() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0 && fd < kNumbers && (word_of(fd).load(std::memory_order_relaxed) & bit_of(fd)) != 0)
    word_of(fd).fetch_and(~bit_of(fd), std::memory_order_relaxed);
  return fd;
}

void raise_descriptor_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

DescriptorUse descriptor_use() noexcept {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  DescriptorUse use{.open = 0, .limit = limit.rlim_cur};
  // Listing /proc/self/fd would itself need a descriptor, and this runs when there is none left.
  const std::uint64_t highest = std::min<std::uint64_t>(limit.rlim_cur, 65536);
  for (std::uint64_t fd = 0; fd < highest; ++fd) {
    if (::fcntl(static_cast<int>(fd), F_GETFD) != -1) ++use.open;
  }
  return use;
}

std::string descriptor_shortage(std::uint64_t needed_more) {
  const DescriptorUse use = descriptor_use();
  return fmt::format("{} file descriptors are open, {} more needed, but the limit is {}; raise it (ulimit -n {})",
                     use.open, needed_more, use.limit, (use.open + needed_more) * 2);
}

void throw_no_descriptor(const std::string& purpose, int code) {
  if (code == EMFILE) throw SystemError(fmt::format("{}: {}", purpose, descriptor_shortage()), code);
  throw_system_error(purpose, code);
}

UniqueFd open_file(const std::string& path, int flags, unsigned mode) {
  return try_new_descriptor([&] { return ::open(path.c_str(), flags, mode); });
}

UniqueFd new_event() {
  return new_descriptor("eventfd", [] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
}

UniqueFd duplicate(int fd) {
  return new_descriptor("fcntl(F_DUPFD_CLOEXEC)", [&] { return ::fcntl(fd, F_DUPFD_CLOEXEC, 0); });
}

}  // namespace maniple
