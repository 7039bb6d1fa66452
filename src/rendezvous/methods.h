// The three ways to meet; `meet` chooses by the scheme of the init method.
#pragma once

#include <string>

#include "rendezvous/rendezvous.h"

namespace maniple {

/// A rank, a world size and the place of the store, checked against each other.
struct RankAssignment {
  int rank = -1;
  int world_size = -1;
  std::string host;
  std::uint16_t port = 0;
};

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
void require_secret_off_loopback(const Secret& secret, const Address& address, const std::string& what);

/// Job, generation and secret from the environment; rank and world size from the arguments.
Identity identity_from_environment(int rank, int world_size);

}  // namespace maniple
