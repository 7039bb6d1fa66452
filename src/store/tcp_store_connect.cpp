#include <algorithm>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"
#include "base/environment.h"
#include "store/tcp_store.h"
#include "store/tcp_store_client.h"

namespace maniple {
namespace {

// The store has no heartbeats of its own, and a request that is not answered may be waited for by its caller alone.
constexpr double kLeastSilence = 30;

SecureConnection dial_any(const std::vector<Address>& addresses, const std::string& name, const Identity& identity,
                          Deadline deadline, Address& reached) {
  const Hello hello{.role = Role::store, .rank = identity.rank, .topic = "store"};
  if (addresses.size() == 1) {
    reached = addresses.front();
    return dial(reached, identity, hello, deadline, true);
  }
  // Several addresses: one try each in turn, as the server listens on one of them only.
  constexpr std::chrono::seconds kTryLimit{5};
  std::chrono::milliseconds pause{1};
  const auto start = Deadline::Clock::now();
  for (;;) {
    std::vector<std::string> reasons;
    for (const Address& address : addresses) {
      try {
        reached = address;
        return dial(address, identity, hello, Deadline::sooner(deadline, Deadline::after(kTryLimit)), false);
      } catch (const Timeout& error) {
        reasons.emplace_back(error.what());
      } catch (const SystemError& error) {
        reasons.emplace_back(error.what());
      }
    }
    if (deadline.remaining() <= pause) {
      const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
      throw Timeout(fmt::format("store at {}: not reachable within {:.1f} s: {}", name, waited.count(),
                                fmt::join(reasons, "; ")));
    }
    std::this_thread::sleep_for(pause);  // sleep: until the next round: nobody can tell us when a port opens
    pause = std::min(pause * 2, std::chrono::milliseconds(100));
  }
}

}  // namespace

std::shared_ptr<Store> connect_tcp_store(const std::string& host, std::uint16_t port, const Identity& identity,
                                         Deadline deadline, std::shared_ptr<void> keep) {
  const std::string name = fmt::format("{}:{}", host, port);
  Address reached;
  SecureConnection connection = dial_any(Address::resolve(host, port, deadline), name, identity, deadline, reached);
  const double heartbeat = knob_number(Knob::heartbeat_s);
  if (heartbeat > 0) set_keepalive(connection.get(), std::max(kLeastSilence, heartbeat));
  return std::make_shared<TcpStoreClient>(std::move(connection), reached, std::move(keep));
}

}  // namespace maniple
