// Resolves names to addresses. getaddrinfo lacks a time limit, so it runs in a thread that is left behind if it is
// slow.
#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <unistd.h>

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

/// False when the deadline has passed; throws Aborted when `cancel` is readable.
bool wait_for_answer(const Lookup& lookup, const std::string& host, Deadline deadline, int cancel) {
  for (;;) {
    pollfd waiting[2] = {{.fd = lookup.finished.get(), .events = POLLIN, .revents = 0},
                         {.fd = cancel, .events = POLLIN, .revents = 0}};
    const int ready = ::poll(waiting, 2, deadline.poll_ms());
    if (ready < 0 && errno != EINTR) throw_system_error("poll");
    if (ready > 0 && waiting[0].revents != 0) return true;
    if (ready > 0) throw Aborted(fmt::format("resolving host \"{}\": given up", host));
    if (ready == 0 && deadline.expired()) return false;
  }
}

}  // namespace

std::vector<Address> Address::resolve(const std::string& host, std::uint16_t port, Deadline deadline, int cancel) {
  MANIPLE_REQUIRE(!host.empty(), "an empty host name cannot be resolved");
  if (Answer literal = ask(host, AI_NUMERICHOST); literal.status == 0) return with_ports(literal.addresses, port);

  const auto start = Deadline::Clock::now();
  auto lookup = std::make_shared<Lookup>();
  start_thread("resolving a name", [lookup, host] {
    Answer answer = ask(host, 0);
    const MutexLock lock(lookup->mutex);
    lookup->answer = std::move(answer);
    const std::uint64_t one = 1;
    const ssize_t rung = ::write(lookup->finished.get(), &one, sizeof one);
    (void)rung;  // the first write to an eventfd cannot fail
  }).detach();

  const bool in_time = wait_for_answer(*lookup, host, deadline, cancel);
  const double waited = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  if (!in_time) {
    throw Timeout(fmt::format("resolving host \"{}\": no answer from the resolver within {:.1f} s; check the name and "
                              "/etc/resolv.conf, or give the address in numbers",
                              host, waited),
                  {}, waited);
  }
  const MutexLock lock(lookup->mutex);
  const Answer& answer = *lookup->answer;
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
