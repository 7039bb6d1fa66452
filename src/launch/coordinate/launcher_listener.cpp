#include "launch/coordinate/launcher_listener.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include "comm/rendezvous/methods.h"

namespace maniple::launch {
namespace {

constexpr const char* kTopic = "launcher";
constexpr std::chrono::seconds kTry{2};
constexpr std::chrono::seconds kResolve{10};

std::vector<Address> addresses_of(const MasterAddress& place, const Secret& secret, Deadline deadline, int cancel) {
  const Deadline soon = Deadline::sooner(deadline, Deadline::after(kResolve));
  std::vector<Address> addresses;
  try {
    addresses = Address::resolve(place.host, place.port, soon, cancel);
  } catch (const Aborted&) {
    throw;
  } catch (const Error& error) {
    throw InvalidArgument(fmt::format("--master {}: {}", to_string(place), error.what()));
  }
  for (const Address& address : addresses) {
    MANIPLE_REQUIRE(!address.is_wildcard(),
                    "--master is {}, which means every address; expected the address of one host", place.host);
    if (secret.is_none()) {
      try {
        require_secret_off_loopback(secret, address, fmt::format("--master {}", place.host));
      } catch (const InvalidArgument&) {
        throw InvalidArgument(fmt::format(
            "--master {} is not loopback, and the job has no secret, so anyone on the network could join it: "
            "give every node the same --secret-file (mode 0600, 64 hexadecimal digits), or on a trusted "
            "network set MANIPLE_ALLOW_NO_SECRET=1",
            place.host));
      }
    }
  }
  return addresses;
}

}  // namespace

struct LauncherListener::Queue {
  Mutex mutex;
  std::deque<SecureConnection> arrived MANIPLE_GUARDED_BY(mutex);
  UniqueFd event = new_event();
};

LauncherListener::LauncherListener(Poller& poller, UniqueFd listener, const Identity& identity,
                                   std::function<void(SecureConnection)> arrived)
    : poller_(poller), address_(Address::of_socket(listener.get())), queue_(std::make_shared<Queue>()) {
  poller_.add(queue_->event.get(), EPOLLIN, [queue = queue_, arrived = std::move(arrived)](std::uint32_t) {
    std::uint64_t count = 0;
    if (::read(queue->event.get(), &count, sizeof count) < 0) return;
    std::deque<SecureConnection> all;
    {
      const MutexLock lock(queue->mutex);
      all.swap(queue->arrived);
    }
    for (SecureConnection& connection : all) arrived(std::move(connection));
  });
  acceptor_ = std::make_unique<Acceptor>(
      EventLoop::shared(), std::move(listener), identity,
      Acceptor::Owner{.refusal = [](const Hello& hello, const Address&) -> std::string {
                        return hello.role == Role::control && hello.topic == kTopic ? ""
                                                                                    : "this is a launcher, not a rank";
                      },
                      .accept =
                          [queue = queue_](SecureConnection connection, const Hello&, const Address&) {
                            {
                              const MutexLock lock(queue->mutex);
                              queue->arrived.push_back(std::move(connection));
                            }
                            const std::uint64_t one = 1;
                            const ssize_t written = ::write(queue->event.get(), &one, sizeof one);
                            (void)written;  // fails only if the event is already set
                          }});
}

LauncherListener::~LauncherListener() {
  acceptor_.reset();
  poller_.remove(queue_->event.get());
}

Identity launcher_identity(const Secret& secret) {
  Identity identity;
  identity.secret = secret;
  identity.job = "maniple-run";
  return identity;
}

namespace {

bool is_listened_on(const Address& address) {
  try {
    connect_to(address, Deadline::after(std::chrono::seconds(1)), false, -1);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Two launchers that bind the port at the same instant may both get EADDRINUSE. So that error counts only once a
/// process listens on the port; otherwise listening is retried after a short random pause.
UniqueFd listen_or_find_listener(const Address& address, Deadline deadline) {
  const Deadline tolerance = Deadline::sooner(deadline, Deadline::after(std::chrono::seconds(10)));
  std::minstd_rand random(static_cast<unsigned>(::getpid()));
  while (!tolerance.expired() && !is_listened_on(address)) {
    // sleep: so that the two do not collide again
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + random() % 20));
    try {
      return listen_on(address);
    } catch (const SystemError& error) {
      if (error.code() != EADDRINUSE) throw;
    }
  }
  return {};
}

}  // namespace

MasterListener listen_as_master(const MasterAddress& place, const Secret& secret, bool port_may_be_taken,
                                Deadline deadline, int cancel) {
  for (const Address& address : addresses_of(place, secret, deadline, cancel)) {
    try {
      return {.fd = listen_on(address)};
    } catch (const SystemError& error) {
      if (error.code() == EADDRNOTAVAIL) continue;
      if (error.code() != EADDRINUSE || !port_may_be_taken) throw;
      if (UniqueFd mine = listen_or_find_listener(address, deadline)) return {.fd = std::move(mine)};
      return {.taken = true};
    }
  }
  return {};
}

Address own_address(const MasterAddress& place, int cancel) {
  try {
    return Address::resolve(place.host, place.port, Deadline::after(kResolve), cancel).front();
  } catch (const Aborted&) {
    throw;
  } catch (const Error& error) {
    throw InvalidArgument(fmt::format("--master {}: {}", to_string(place), error.what()));
  }
}

SecureConnection dial_master(const MasterAddress& place, const Secret& secret, Deadline deadline, int cancel,
                             const std::function<void(const std::string&)>& waiting) {
  const std::vector<Address> addresses = addresses_of(place, secret, deadline, cancel);
  const Hello hello{.role = Role::control, .rank = -1, .topic = kTopic};
  const auto start = Deadline::Clock::now();
  bool reported = false;
  std::string reason;
  for (;;) {
    for (const Address& address : addresses) {
      try {
        return dial(address, launcher_identity(secret), hello, Deadline::sooner(deadline, Deadline::after(kTry)),
                    addresses.size() == 1, cancel);
      } catch (const Timeout& error) {
        reason = error.what();
      } catch (const SystemError& error) {
        reason = error.what();
      }
    }
    const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
    if (deadline.expired()) {
      throw Timeout(
          fmt::format("timed out after {:.0f} s: no master at {}: {}; start `maniple run` with --node-rank 0 there",
                      waited.count(), to_string(place), reason),
          {}, waited.count());
    }
    if (!reported && waited.count() > 3) {
      waiting(fmt::format("maniple: waiting for the master at {}: {}", to_string(place), reason));
      reported = true;
    }
    pollfd state{.fd = cancel, .events = POLLIN, .revents = 0};
    if (::poll(&state, 1, Deadline::sooner(deadline, Deadline::after(std::chrono::milliseconds(100))).poll_ms()) > 0) {
      throw Aborted("interrupted while waiting for the master");
    }
  }
}

}  // namespace maniple::launch
