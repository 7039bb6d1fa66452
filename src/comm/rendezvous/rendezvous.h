// Rendezvous (env://, tcp://, file://): a process obtains its rank and finds the other ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include <maniple/comm/options.h>
#include <maniple/comm/store.h>

namespace maniple {

/// The result of a rendezvous. The identity's rank and world size are set.
struct RendezvousResult {
  std::shared_ptr<Store> store;  ///< the keys of this generation of the job; see round.h
  Identity identity;
  std::function<void()> met = {};  ///< call when all ranks have met: lifts the limits of init(); may be empty
  Address data_address;  ///< where this process listens for data: the interface that leads to the others, port 0
};

/// Resolves `options.init_method`. Throws InvalidArgument with the invalid variable or part of the address, its value
/// and what was expected; Timeout when the store cannot be reached.
///
/// Environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; checked for consistency: LOCAL_RANK, LOCAL_WORLD_SIZE,
/// NODE_RANK. MANIPLE_JOB is the job's name, MANIPLE_GENERATION counts restarts, MANIPLE_STORE_HOSTED=1 means that the
/// launcher serves the store. The secret comes from MANIPLE_SECRET_FD (an inherited descriptor) or MANIPLE_SECRET_FILE
/// (mode 0600). Without a secret rank 0 logs a warning and only loopback is used, unless MANIPLE_ALLOW_NO_SECRET=1.
RendezvousResult rendezvous(const InitOptions& options, Deadline deadline);

// Notices from a rank to the launcher that started it, through the socket in MANIPLE_INIT_FD: that the rank waits in
// init() for the others, and that init() is done. When a rank ends early, the launcher knows at once that the others
// wait for it in vain.

/// Called in init(), before it waits. `world_size` is the program's request; 0 or less: the launcher's world size.
/// Sends nothing if the requested world size differs from the launcher's, because then not all of the launcher's
/// processes need to join.
void notify_init_started(int world_size) noexcept;

/// Called when all ranks have arrived.
void notify_init_done() noexcept;

// In an elastic job RANK names the worker for its lifetime; its rank changes with the generation.

/// This worker has lost the ranks `lost` of a generation: the launcher ends them if they still run.
void notify_lost(std::uint32_t generation, const std::vector<int>& lost) noexcept;
/// This worker leaves the job in good order, and the others go on.
void notify_leaving() noexcept;

}  // namespace maniple
