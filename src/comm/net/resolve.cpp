// Resolves names to addresses. getaddrinfo lacks a time limit, so it runs in a thread that is left behind if it is
// slow.
#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include "comm/base/threads.h"
#include "comm/net/address.h"

namespace maniple {
namespace {

constexpr double kNoticeable_s = 0.5;  // errors after a longer wait include the time

struct Answer {
  int status = 0;  // EAI_...
  int code = 0;    // errno, for EAI_SYSTEM
  std::vector<Address> addresses;
};

struct Lookup {
  Mutex mutex;
  std::optional<Answer> answer MANIPLE_GUARDED_BY(mutex);
  UniqueFd finished = new_event();  // readable once `answer` is set
};

Answer ask(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  Answer answer;
  answer.status = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
  answer.code = errno;
  if (answer.status != 0) return answer;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    answer.addresses.push_back(Address::from_raw(entry->ai_addr, entry->ai_addrlen));
  }
  ::freeaddrinfo(list);
  return answer;
}

std::vector<Address> with_ports(std::vector<Address> addresses, std::uint16_t port) {
  for (Address& address : addresses) address = address.with_port(port);
  return addresses;
}

/// Waits until `fd` is readable. False: the deadline has passed; throws Aborted when `cancel` is readable.
bool wait_readable(int fd, int cancel, const std::string& host, Deadline deadline) {
  for (;;) {
    pollfd waiting[2] = {{.fd = fd, .events = POLLIN, .revents = 0}, {.fd = cancel, .events = POLLIN, .revents = 0}};
    const int ready = ::poll(waiting, 2, deadline.poll_ms());
    if (ready < 0 && errno != EINTR) throw_system_error("poll");
    if (ready > 0 && waiting[0].revents != 0) return true;
    if (ready > 0) throw Aborted(fmt::format("resolving host \"{}\": given up", host));
    if (ready == 0 && deadline.expired()) return false;
  }
}

/// One question to the resolver; nullopt: no answer before the deadline.
std::optional<Answer> look_up(const std::string& host, Deadline deadline, int cancel) {
  auto lookup = std::make_shared<Lookup>();
  start_thread("resolving a name", [lookup, host] {
    Answer answer = ask(host, 0);
    const MutexLock lock(lookup->mutex);
    lookup->answer = std::move(answer);
    const std::uint64_t one = 1;
    const ssize_t rung = ::write(lookup->finished.get(), &one, sizeof one);
    (void)rung;  // the first write to an eventfd cannot fail
  }).detach();
  if (!wait_readable(lookup->finished.get(), cancel, host, deadline)) return std::nullopt;
  const MutexLock lock(lookup->mutex);
  return lookup->answer;
}

/// Whether a later question may get another answer: the name servers did not reply, or this host lacks something.
bool may_pass(const Answer& answer) {
  if (answer.status == EAI_SYSTEM) return network_may_recover(answer.code) || is_local_shortage(answer.code);
  return answer.status == EAI_AGAIN || answer.status == EAI_MEMORY;
}

}  // namespace

std::vector<Address> Address::resolve(const std::string& host, std::uint16_t port, Deadline deadline, int cancel) {
  MANIPLE_REQUIRE(!host.empty(), "an empty host name cannot be resolved");
  if (Answer literal = ask(host, AI_NUMERICHOST); literal.status == 0) return with_ports(literal.addresses, port);

  // Long enough for a network or a name server that has just been started, short enough for a wrong name on a host
  // without a name server, which gets the same answer.
  constexpr std::chrono::seconds kRepeatLimit{30};
  const Deadline repeat_until = Deadline::sooner(deadline, Deadline::after(kRepeatLimit));
  const auto start = Deadline::Clock::now();
  std::chrono::milliseconds pause{50};
  std::optional<Answer> found = look_up(host, deadline, cancel);
  while (found && may_pass(*found) && repeat_until.remaining() > pause) {
    wait_readable(-1, cancel, host, Deadline::after(pause));
    pause = std::min(pause * 2, std::chrono::milliseconds(1000));
    if (auto next = look_up(host, repeat_until, cancel)) found = std::move(next);
  }
  const double waited = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  if (!found) {
    throw Timeout(fmt::format("resolving host \"{}\": no answer from the resolver within {:.1f} s; check the name and "
                              "/etc/resolv.conf, or give the address in numbers",
                              host, waited),
                  {}, waited);
  }
  const Answer& answer = *found;
  if (answer.status != 0 || answer.addresses.empty()) {
    std::string reason = answer.status == 0            ? "it has no IPv4 or IPv6 address"
                         : answer.status == EAI_SYSTEM ? errno_text(answer.code)
                                                       : ::gai_strerror(answer.status);
    if (waited >= kNoticeable_s) reason += fmt::format(" (after {:.1f} s)", waited);
    throw SystemError(fmt::format("resolving host \"{}\": {}", host, reason),
                      answer.status == EAI_SYSTEM ? answer.code : EADDRNOTAVAIL);
  }
  return with_ports(answer.addresses, port);
}

}  // namespace maniple
