// The three kinds of rendezvous; rendezvous() chooses by the scheme of the init method.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/base/environment.h"
#include "comm/rendezvous/rendezvous.h"

namespace maniple {

/// The parts of an init method: "tcp://host:port?rank=1&world_size=4". Pure.
struct InitMethod {
  std::string scheme;  ///< "env", "tcp", "file"
  std::string place;   ///< what stands between "://" and "?"
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Throws InvalidArgument naming the part that is wrong, what it holds and what was expected.
InitMethod parse_init_method(std::string_view text);

struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// "host:port" or "[::1]:port"; `text` is only for the message.
HostPort parse_host_port(std::string_view place, std::string_view text);

/// The one value of two sources that may both be silent (nullopt). Throws InvalidArgument naming both if they differ.
struct Source {
  std::string_view name;
  std::optional<int> value;
};
std::optional<int> agreed(const Source& a, const Source& b);

/// Checks 0 <= rank < world_size; the names say where the two came from.
void require_rank_in_world(int rank, std::string_view rank_name, int world_size, std::string_view world_size_name);

/// A rank, a world size and the place of the store, checked against each other.
struct RankAssignment {
  int rank = -1;
  int world_size = -1;
  std::string host;
  std::uint16_t port = 0;
};

/// Whether this program was started by itself: env:// with nothing in the options and none of RANK, WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT or a scheduler's variables set.
bool has_no_launcher(const InitOptions& options);
/// Reads the environment for env://. Pure but for getenv.
RankAssignment assignment_from_environment(const InitOptions& options);
/// Reads tcp://host:port?rank=R&world_size=N.
RankAssignment assignment_from_address(const InitOptions& options);

/// Starts or reaches the store of the assignment: what env:// and tcp:// share.
RendezvousResult rendezvous_by_tcp(const RankAssignment& assignment, Deadline deadline);
RendezvousResult rendezvous_by_file(const InitOptions& options, Deadline deadline);

/// Where this process listens for data: MANIPLE_INTERFACE, or else the local end of the route to `master`.
Address choose_data_address(const Address& master);
/// Throws unless the job has a secret, the address is loopback, or MANIPLE_ALLOW_NO_SECRET=1. `what` names the address.
/// `warns`: logs, once, that there is no secret; one rank of a job does.
void require_secret_off_loopback(const Secret& secret, const Address& address, const std::string& what,
                                 bool warns = true);

/// Job, generation and secret from the environment; rank and world size from the arguments.
Identity identity_from_environment(int rank, int world_size);

/// The keys of this generation. A rank belongs to one process in one generation: throws InvalidArgument naming both
/// processes if the rank is another one's.
std::shared_ptr<Store> register_rank(std::shared_ptr<Store> store, const Identity& identity);
/// The same without a rank of one's own; see take_rank.
std::shared_ptr<Store> store_of_generation(std::shared_ptr<Store> store, const Identity& identity);

}  // namespace maniple
