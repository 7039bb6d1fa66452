#include "comm/rendezvous/secret_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

constexpr std::size_t kMostBytes = 128;
constexpr const char* kExpected = "expected 64 hexadecimal digits or 32 raw bytes, not all zero";

std::optional<int> digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return std::nullopt;
}

/// Reads from the start if the descriptor is seekable: all processes that inherited it share its offset.
std::string read_from(int fd, const std::string& what) {
  std::string bytes(kMostBytes, '\0');
  std::size_t done = 0;
  bool seekable = true;
  while (done < bytes.size()) {
    ssize_t got = seekable ? ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done))
                           : ::read(fd, bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == ESPIPE) {
      seekable = false;
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    MANIPLE_REQUIRE(got >= 0, "{}: it cannot be read: {}", what, errno_text(errno));
    if (got == 0) break;
    done += got;
  }
  bytes.resize(done);
  return bytes;
}

Secret parse_or_throw(const std::string& bytes, const std::string& what) {
  const auto secret = parse_secret(bytes);
  MANIPLE_REQUIRE(secret.has_value(), "{} holds {} bytes that are not a secret; {}", what, bytes.size(), kExpected);
  return *secret;
}

// A pipe can be read only once, but a process and its children of fork() may join several times.
class PipeSecrets {
 public:
  static PipeSecrets& all() {
    static auto& secrets = *new PipeSecrets;  // never destroyed: static objects may call init()
    return secrets;
  }
  std::optional<Secret> find(int fd) {
    const MutexLock lock(mutex_);
    const auto found = known_.find(fd);
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }
  void add(int fd, const Secret& secret) {
    const MutexLock lock(mutex_);
    known_.emplace(fd, secret);
  }

 private:
  ForkSafeMutex mutex_;
  std::map<int, Secret> known_ MANIPLE_GUARDED_BY(mutex_);
};

constinit ProcessWide<Mutex> reading;  // held for long if the pipe's writer is slow

Secret from_descriptor(int fd) {
  const std::string what = fmt::format("MANIPLE_SECRET_FD is {}", fd);
  const MutexLock lock(*reading);
  if (const auto known = PipeSecrets::all().find(fd)) return *known;
  struct stat status{};
  const bool pipe = ::fstat(fd, &status) == 0 && !S_ISREG(status.st_mode);
  const Secret secret = parse_or_throw(read_from(fd, what), what);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // hidden from programs that this process starts
  if (pipe) PipeSecrets::all().add(fd, secret);
  return secret;
}

}  // namespace

std::optional<Secret> parse_secret(std::string_view text) {
  Secret secret;
  if (text.size() == secret.bytes.size()) {
    std::copy(text.begin(), text.end(), secret.bytes.begin());
  } else {
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
    if (text.size() != 2 * secret.bytes.size()) return std::nullopt;
    for (std::size_t i = 0; i < secret.bytes.size(); ++i) {
      const auto high = digit_of(text[2 * i]);
      const auto low = digit_of(text[2 * i + 1]);
      if (!high || !low) return std::nullopt;
      secret.bytes[i] = static_cast<std::uint8_t>(*high * 16 + *low);
    }
  }
  if (secret.is_none()) return std::nullopt;
  return secret;
}

std::string hex_of(const Secret& secret) { return fmt::format("{:02x}", fmt::join(secret.bytes, "")); }

Secret secret_from_file(const std::string& path, const std::string& what) {
  const UniqueFd fd = open_file(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  MANIPLE_REQUIRE(static_cast<bool>(fd), "{}: it cannot be opened: {}", what, errno_text(errno));
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) throw_system_error(what);
  MANIPLE_REQUIRE(S_ISREG(status.st_mode), "{}, which is not a regular file", what);
  MANIPLE_REQUIRE((status.st_mode & 077) == 0, "{}, whose mode {:03o} lets others read it; expected 600", what,
                  status.st_mode & 0777);
  return parse_or_throw(read_from(fd.get(), what), what);
}

std::optional<Secret> secret_from_environment() {
  require_not_empty("MANIPLE_SECRET_FD");
  require_not_empty("MANIPLE_SECRET_FILE");
  const auto path = environment_text("MANIPLE_SECRET_FILE");
  if (const auto fd = environment_integer("MANIPLE_SECRET_FD", 0, 1 << 20)) {
    MANIPLE_REQUIRE(!path, "MANIPLE_SECRET_FD is {} and MANIPLE_SECRET_FILE is \"{}\"; expected one of them", *fd,
                    *path);
    return from_descriptor(static_cast<int>(*fd));
  }
  if (path) return secret_from_file(*path, fmt::format("MANIPLE_SECRET_FILE is \"{}\"", *path));
  return std::nullopt;
}

}  // namespace maniple
