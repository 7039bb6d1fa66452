// tcp://host:port, and the part that env:// shares with it: rank 0 serves the store there, everyone connects.
#include <cerrno>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"
#include "base/environment.h"
#include "base/log.h"
#include "rendezvous/claim.h"
#include "rendezvous/hosted_store.h"
#include "rendezvous/init_method.h"
#include "rendezvous/methods.h"
#include "store/tcp_store.h"

namespace maniple {
namespace {

/// Listens on the one of the addresses that is this host's.
std::shared_ptr<TcpStoreServer> serve(const Seat& seat, const std::vector<Address>& addresses, const Identity& identity,
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
                  seat.host, seat.port, fmt::join(tried, ", ")));
}

}  // namespace

Seat seat_from_address(const JoinOptions& options) {
  const InitMethod method = parse_init_method(options.init_method);
  const HostPort place = parse_host_port(method.place, options.init_method);
  const auto given = [](int option) { return option == -1 ? std::nullopt : std::optional<int>(option); };
  const auto rank = agreed({"JoinOptions::rank", given(options.rank)}, {"the init method's rank", method.rank});
  const auto world_size = agreed({"JoinOptions::world_size", given(options.world_size)},
                                 {"the init method's world_size", method.world_size});
  MANIPLE_REQUIRE(rank.has_value(), "{}: no rank; set JoinOptions::rank or add ?rank=R", options.init_method);
  MANIPLE_REQUIRE(world_size.has_value(), "{}: no world size; set JoinOptions::world_size or add ?world_size=N",
                  options.init_method);
  require_rank_in_world(*rank, "rank", *world_size, "world size");
  return {.rank = *rank, .world_size = *world_size, .host = place.host, .port = place.port};
}

Meeting meet_by_tcp(const Seat& seat, Deadline deadline) {
  Meeting meeting;
  meeting.identity = identity_from_environment(seat.rank, seat.world_size);
  const std::vector<Address> addresses = Address::resolve(seat.host, seat.port, deadline);
  for (const Address& address : addresses) {
    MANIPLE_REQUIRE(!address.is_wildcard(),
                    "the master address is {}, which means every address; expected that of one host", seat.host);
    require_secret_off_loopback(meeting.identity.secret, address, fmt::format("the master address {}", seat.host));
  }

  std::shared_ptr<TcpStoreServer> server;
  const bool hosted = environment_integer("MANIPLE_STORE_HOSTED", 0, 1).value_or(0) != 0;
  if (seat.rank == 0 && !hosted) server = serve(seat, addresses, meeting.identity, deadline);
  const std::string host = server ? server->address().host() : seat.host;
  auto store = connect_tcp_store(host, seat.port, meeting.identity, deadline, server);
  meeting.store = claim_rank(std::move(store), meeting.identity);
  meeting.data_address = choose_data_address(addresses.front());
  require_secret_off_loopback(meeting.identity.secret, meeting.data_address, "the data address");
  return meeting;
}

}  // namespace maniple
