// Rendezvous: how a process learns its rank and finds the others: env://, tcp://, file://.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include <maniple/comm/options.h>
#include <maniple/comm/store.h>

namespace maniple {

/// What a rendezvous gives. The identity's rank and world size are set.
struct RendezvousResult {
  std::shared_ptr<Store> store;  ///< the keys of this generation of the job; see round.h
  Identity identity;
  std::function<void()> met = {};  ///< to be called when all ranks have met: ends the limits of init(); may be empty
  Address data_address;  ///< where this process listens for data: the interface that leads to the others, port 0
};

/// Resolves `options.init_method`. Throws InvalidArgument naming the variable or part of the address that is wrong,
/// what it holds and what was expected; Timeout when the store cannot be reached.
///
/// Environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; checked against each other: LOCAL_RANK, LOCAL_WORLD_SIZE,
/// NODE_RANK. MANIPLE_JOB names the job, MANIPLE_GENERATION counts restarts, MANIPLE_STORE_HOSTED=1 says that the
/// launcher serves the store. The secret comes from MANIPLE_SECRET_FD (an inherited descriptor) or MANIPLE_SECRET_FILE
/// (mode 0600); without one rank 0 logs a warning and only loopback is used, unless MANIPLE_ALLOW_NO_SECRET=1.
RendezvousResult rendezvous(const InitOptions& options, Deadline deadline);

// Notices from a rank to the launcher that started it, through the socket that MANIPLE_INIT_FD names: that it waits in
// init() for the others, and that init() is done. So the launcher knows at once when a rank ends that the others will
// wait for in vain.

/// In init(), before it waits. `world_size` is what the program asked for, 0 or less: the launcher's own. Says nothing
/// when that is another world than the launcher's: then not all of its processes need to come.
void notify_init_started(int world_size) noexcept;

/// All ranks have arrived.
void notify_init_done() noexcept;

}  // namespace maniple
