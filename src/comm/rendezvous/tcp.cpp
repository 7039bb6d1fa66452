// tcp://host:port, and the part that env:// shares with it: rank 0 serves the store there, and all ranks connect.
#include <cerrno>
#include <map>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/fork_guard.h"
#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "comm/rendezvous/methods.h"
#include "comm/rendezvous/round.h"
#include "comm/store/tcp_store.h"

namespace maniple {
namespace {

// The store's server in rank 0 outlives rank 0's group: other ranks may still be reading, or may already have returned
// for the next group. When rank 0 releases the server, it stays until its last client has left. If rank 0 calls init()
// again before that, it gets the same server back.

struct Hosted {
  std::weak_ptr<TcpStoreServer> server;
  Identity identity;
};

struct Registry {
  Mutex mutex;
  std::map<std::string, Hosted> servers MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Registry> registry;

bool same_job(const Identity& a, const Identity& b) {
  return a.secret.bytes == b.secret.bytes && a.job == b.job && a.generation == b.generation &&
         a.world_size == b.world_size;
}

/// The same process has created its group again, without lost ranks.
bool is_later_generation(const Identity& a, const Identity& b) {
  return a.secret.bytes == b.secret.bytes && a.job == b.job && a.generation > b.generation;
}

/// Rank 0's handle: releasing it retires the server instead of ending it.
std::shared_ptr<TcpStoreServer> handle_of(std::shared_ptr<TcpStoreServer> server) {
  TcpStoreServer* raw = server.get();
  return {raw, [server = std::move(server)](TcpStoreServer*) mutable { TcpStoreServer::retire(std::move(server)); }};
}

std::shared_ptr<TcpStoreServer> host_store(const Address& address, const Identity& identity, Deadline deadline) {
  constexpr std::chrono::seconds kOwnPortLimit{10};
  const Deadline limit = Deadline::sooner(deadline, Deadline::after(kOwnPortLimit));
  const std::string name = address.to_string();
  for (;;) {
    bool ours = false;
    {
      Registry& mine = *registry;
      const MutexLock lock(mine.mutex);
      auto& servers = mine.servers;
      if (const auto found = servers.find(name); found != servers.end()) {
        ours = true;
        if (auto server = found->second.server.lock(); server && same_job(found->second.identity, identity)) {
          return handle_of(std::move(server));
        } else if (server && is_later_generation(identity, found->second.identity)) {
          server->end_if_retiring();  // a lost rank that is stopped or disconnected would keep it
        }
      }
      try {
        auto server = std::make_shared<TcpStoreServer>(address, identity);
        servers[name] = Hosted{server, identity};
        return handle_of(std::move(server));
      } catch (const SystemError& error) {
        // The port may still be held by an earlier server of this process that is shutting down.
        if (error.code() != EADDRINUSE || !ours || limit.expired()) throw;
      }
    }
    // sleep: the kernel frees the port without notification
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

/// Listens on the first address that belongs to this host.
std::shared_ptr<TcpStoreServer> serve(const RankAssignment& assignment, const std::vector<Address>& addresses,
                                      const Identity& identity, Deadline deadline) {
  std::vector<std::string> tried;
  for (const Address& address : addresses) {
    try {
      return host_store(address, identity, deadline);
    } catch (const SystemError& error) {
      if (error.code() != EADDRNOTAVAIL) throw;
      tried.push_back(address.host());
    }
  }
  throw InvalidArgument(
      fmt::format("rank 0 serves the store at {}:{}, but {} is not an address of this host; expected the "
                  "address of the host that runs rank 0",
                  assignment.host, assignment.port, fmt::join(tried, ", ")));
}

}  // namespace

RankAssignment assignment_from_address(const InitOptions& options) {
  const InitMethod method = parse_init_method(options.init_method);
  const HostPort place = parse_host_port(method.place, options.init_method);
  const auto given = [](int option) { return option == -1 ? std::nullopt : std::optional<int>(option); };
  const auto rank = agreed({"InitOptions::rank", given(options.rank)}, {"the init method's rank", method.rank});
  const auto world_size = agreed({"InitOptions::world_size", given(options.world_size)},
                                 {"the init method's world_size", method.world_size});
  MANIPLE_REQUIRE(rank.has_value(), "{}: no rank; set InitOptions::rank or add ?rank=R", options.init_method);
  MANIPLE_REQUIRE(world_size.has_value(), "{}: no world size; set InitOptions::world_size or add ?world_size=N",
                  options.init_method);
  require_rank_in_world(*rank, "rank", *world_size, "world size");
  return {.rank = *rank, .world_size = *world_size, .host = place.host, .port = place.port};
}

RendezvousResult rendezvous_by_tcp(const RankAssignment& assignment, Deadline deadline, std::uint32_t generation) {
  RendezvousResult result;
  result.identity = identity_from_environment(assignment.rank, assignment.world_size);
  result.identity.generation += generation;
  const std::vector<Address> addresses = Address::resolve(assignment.host, assignment.port, deadline);
  for (const Address& address : addresses) {
    MANIPLE_REQUIRE(!address.is_wildcard(),
                    "the master address is {}, which means every address; expected the address of one host",
                    assignment.host);
    require_secret_off_loopback(result.identity.secret, address, fmt::format("the master address {}", assignment.host),
                                assignment.rank == 0);
  }

  std::shared_ptr<TcpStoreServer> server;
  const bool hosted = environment_integer("MANIPLE_STORE_HOSTED", 0, 1).value_or(0) != 0;
  if (assignment.rank == 0 && !hosted) server = serve(assignment, addresses, result.identity, deadline);
  const std::string host = server ? server->address().host() : assignment.host;
  const auto store = [&] {
    const WaitNotice notice(fmt::format("no connection to the store at {}:{}, which {} serves; was it started there?",
                                        host, assignment.port, hosted ? "the launcher" : "rank 0"));
    try {
      return connect_tcp_store(host, assignment.port, result.identity, deadline, server);
    } catch (const Timeout& timeout) {
      if (hosted) throw;
      const double waited = timeout.info().waited_s;
      throw Timeout(
          fmt::format("timed out after {:.1f} s: waiting for rank 0, which serves the store. Was it started, with "
                      "the same address? {}",
                      waited, timeout.info().reason),
          {0}, waited);
    }
  }();
  store->limit_requests(deadline);
  result.met = [store] { store->limit_requests(Deadline::never()); };
  {
    const WaitNotice notice(fmt::format("the {} does not answer; is its process stopped?", store->describe()));
    result.store = register_rank(store, result.identity);
  }
  result.data_address = choose_data_address(addresses.front());
  require_secret_off_loopback(result.identity.secret, result.data_address, "the data address", assignment.rank == 0);
  return result;
}

}  // namespace maniple
