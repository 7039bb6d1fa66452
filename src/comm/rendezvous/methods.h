// The three rendezvous methods; rendezvous() chooses one by the scheme of the init method.
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
  std::string place;   ///< the text between "://" and "?"
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Throws InvalidArgument with the invalid part, its value and what was expected.
InitMethod parse_init_method(std::string_view text);

struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// Parses "host:port" or "[::1]:port"; `text` is used only in the error.
HostPort parse_host_port(std::string_view place, std::string_view text);

/// The value that two sources agree on; each may lack a value (nullopt). Throws InvalidArgument naming both if they
/// differ.
struct Source {
  std::string_view name;
  std::optional<int> value;
};
std::optional<int> agreed(const Source& a, const Source& b);

/// Checks 0 <= rank < world_size; the names state where rank and world size came from.
void require_rank_in_world(int rank, std::string_view rank_name, int world_size, std::string_view world_size_name);

/// A rank, a world size and the address of the store, checked for consistency.
struct RankAssignment {
  int rank = -1;
  int world_size = -1;
  std::string host;
  std::uint16_t port = 0;
};

/// Whether this program was started without a launcher: env:// with empty options, and none of RANK, WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT or a scheduler's variables set.
bool has_no_launcher(const InitOptions& options);
/// Reads the environment for env://. Pure except for getenv.
RankAssignment assignment_from_environment(const InitOptions& options);
/// Reads tcp://host:port?rank=R&world_size=N.
RankAssignment assignment_from_address(const InitOptions& options);

/// Starts the assignment's store, or connects to it; shared by env:// and tcp://. `generation`: of an elastic job,
/// counted on top of MANIPLE_GENERATION.
RendezvousResult rendezvous_by_tcp(const RankAssignment& assignment, Deadline deadline, std::uint32_t generation = 0);
RendezvousResult rendezvous_by_file(const InitOptions& options, Deadline deadline);

/// The address on which this process listens for data: MANIPLE_INTERFACE, or else the local end of the route to
/// `master`.
Address choose_data_address(const Address& master);
/// Throws unless the job has a secret, the address is loopback, or MANIPLE_ALLOW_NO_SECRET=1. `what` describes the
/// address. With `warns`, logs once that the job lacks a secret; one rank per job does.
void require_secret_off_loopback(const Secret& secret, const Address& address, const std::string& what,
                                 bool warns = true);

/// Job, generation and secret from the environment; rank and world size from the arguments.
Identity identity_from_environment(int rank, int world_size);

/// The store with the keys of this generation. A rank belongs to one process per generation: throws InvalidArgument
/// naming both processes if another process has the rank.
std::shared_ptr<Store> register_rank(std::shared_ptr<Store> store, const Identity& identity);
/// Like register_rank, for a process that does not have a rank yet; see take_rank.
std::shared_ptr<Store> store_of_generation(std::shared_ptr<Store> store, const Identity& identity);

}  // namespace maniple
