// Names to addresses. getaddrinfo has no time limit of its own, so it runs in a thread that is left behind if it is
// slow.
#include <arpa/inet.h>
#include <netdb.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/system_error.h"
#include "net/address.h"

namespace maniple {
namespace {

struct Lookup {
  std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
  int status = 0;  // EAI_...
  int code = 0;    // errno, for EAI_SYSTEM
  std::vector<Address> addresses;
};

struct Answer {
  int status = 0;
  int code = 0;
  std::vector<Address> addresses;
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

}  // namespace

std::vector<Address> Address::resolve(const std::string& host, std::uint16_t port, Deadline deadline) {
  MANIPLE_REQUIRE(!host.empty(), "an empty host name cannot be resolved");
  if (Answer literal = ask(host, AI_NUMERICHOST); literal.status == 0) return with_ports(literal.addresses, port);

  const auto start = Deadline::Clock::now();
  auto lookup = std::make_shared<Lookup>();
  std::thread([lookup, host] {
    Answer answer = ask(host, 0);
    const std::lock_guard lock(lookup->mutex);
    lookup->status = answer.status;
    lookup->code = answer.code;
    lookup->addresses = std::move(answer.addresses);
    lookup->done = true;
    lookup->finished.notify_all();
  }).detach();

  std::unique_lock lock(lookup->mutex);
  const auto done = [&] { return lookup->done; };
  if (deadline.is_never()) {
    lookup->finished.wait(lock, done);
  } else if (!lookup->finished.wait_until(lock, deadline.when(), done)) {
    const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
    throw Timeout(
        fmt::format("resolving host \"{}\": no answer from the resolver within {:.1f} s", host, waited.count()));
  }
  if (lookup->status != 0 || lookup->addresses.empty()) {
    const std::string reason = lookup->status == 0            ? "it has no IPv4 or IPv6 address"
                               : lookup->status == EAI_SYSTEM ? errno_text(lookup->code)
                                                              : ::gai_strerror(lookup->status);
    throw SystemError(fmt::format("resolving host \"{}\": {}", host, reason),
                      lookup->status == EAI_SYSTEM ? lookup->code : EADDRNOTAVAIL);
  }
  return with_ports(lookup->addresses, port);
}

}  // namespace maniple
