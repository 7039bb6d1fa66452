// What is known of the launcher that started this process, and what it does when a rank is lost.
#pragma once

#include "backend/plugin/plugin.h"

namespace maniple::mpi_engine {

/// Whether it started more ranks on this host than there are cores for them.
bool shares_cores();

/// Before MPI_Init: keeps MPI from ending the process when a peer is gone, and from what slows it down.
void choose_transports();

/// After MPI_Init: notes the launcher's signal that a rank is lost, if it sends one.
void listen_for_losses();

/// Before MPI_Finalize, when all ranks are at their end: keeps it from waiting for the others to answer.
void drop_connections();

/// How long a rank waits for the others to come to their end, before MPI_Finalize. Asked again while it waits.
///
/// Ranks may come to their end at very different times: one of them writes a file for minutes. A launcher that ends the job when
/// a rank is lost ends the waiting too; one that does not leaves it to this limit.
Deadline::Duration patience_at_exit();

}  // namespace maniple::mpi_engine
