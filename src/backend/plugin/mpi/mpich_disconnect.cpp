// MPICH's MPI_Finalize waits for ever, now and then, when it runs on UCX (4.0.2 of Debian 12; pmodels/mpich#6596 mends it): each
// rank first closes its connections in good order, which takes answers of the other side, and then waits for the other processes
// in a call that answers nobody. So whoever closes last may never be answered. Connections that a pair has opened but not used
// yet are enough for it: ranks that end soon after they met, more of them than there are cores.
//
// The mpi backend ends only after all ranks have said that they are at their end. Nobody wants an answer then, and connections
// may be dropped. That is what happens here: MPICH looks for the functions of UCX in this library before it looks in UCX.
#include <dlfcn.h>

#include <atomic>

#include "backend/plugin/mpi/mpi_launcher.h"

namespace {
std::atomic<bool> drop{false};
}

void maniple::mpi_engine::drop_connections() { drop.store(true); }

/// A request to wait for, or null: done.
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* connection) {
  if (drop.load()) return nullptr;
  using Disconnect = void* (*)(void*);
  static const auto kOriginal = reinterpret_cast<Disconnect>(::dlsym(RTLD_NEXT, "ucp_disconnect_nb"));
  return kOriginal != nullptr ? kOriginal(connection) : nullptr;
}
