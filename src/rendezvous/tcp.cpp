// tcp://host:port, and the part that env:// shares with it: rank 0 serves the store there, everyone connects.
#include <cerrno>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"
#include "base/environment.h"
#include "base/log.h"
#include "rendezvous/rank_claim.h"
#include "rendezvous/hosted_store.h"
#include "rendezvous/init_method.h"
#include "rendezvous/methods.h"
#include "store/tcp_store.h"

namespace maniple {
namespace {

/// Listens on the one of the addresses that is this host's.
std::shared_ptr<TcpStoreServer> serve(const RankAssignment& assignment, const std::vector<Address>& addresses, const Identity& identity,
                                      Deadline deadline) {
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

RendezvousResult rendezvous_by_tcp(const RankAssignment& assignment, Deadline deadline) {
  RendezvousResult result;
  result.identity = identity_from_environment(assignment.rank, assignment.world_size);
  const std::vector<Address> addresses = Address::resolve(assignment.host, assignment.port, deadline);
  for (const Address& address : addresses) {
    MANIPLE_REQUIRE(!address.is_wildcard(),
                    "the master address is {}, which means every address; expected that of one host", assignment.host);
    require_secret_off_loopback(result.identity.secret, address, fmt::format("the master address {}", assignment.host));
  }

  std::shared_ptr<TcpStoreServer> server;
  const bool hosted = environment_integer("MANIPLE_STORE_HOSTED", 0, 1).value_or(0) != 0;
  if (assignment.rank == 0 && !hosted) server = serve(assignment, addresses, result.identity, deadline);
  const std::string host = server ? server->address().host() : assignment.host;
  auto store = connect_tcp_store(host, assignment.port, result.identity, deadline, server);
  result.store = claim_rank(std::move(store), result.identity);
  result.data_address = choose_data_address(addresses.front());
  require_secret_off_loopback(result.identity.secret, result.data_address, "the data address");
  return result;
}

}  // namespace maniple
