// What differs between the implementations of MPI, Open MPI and MPICH: their transports, their launchers, their files.
#pragma once

#include "comm/backend/plugin/plugin.h"

namespace maniple::mpi_plugin {

/// Whether mpirun started more ranks on this host than there are cores.
bool shares_cores();

/// Before MPI_Init: keeps MPI from ending the process when a peer is gone, and from what slows it down.
void choose_transports();

/// After MPI_Init: notes the launcher's signal that a rank is lost, if it sends one.
void watch_for_losses();

/// Before MPI_Finalize, when all ranks are about to exit: keeps it from waiting for the others to answer.
void drop_connections();

/// How long a rank waits for the others to be about to exit, before MPI_Finalize. Asked again while it waits.
///
/// Ranks may end at very different times: one of them writes a file for minutes. A launcher that ends the job when a
/// rank is lost ends the waiting too; one that does not leaves it to this limit.
Deadline::Duration exit_limit();

/// Open MPI's ranks of a host share memory by a file each, /dev/shm/vader_segment.HOST.UID.JOB.RANK of 4 MiB, which is
/// removed in MPI_Finalize: a rank that is killed, or ends without MPI_Finalize because another was lost, would leave
/// it behind for ever, and a host would run out of memory after some failed jobs. No call_context of Open MPI 4
/// prevents that but one that moves the files to a disk. So, as MPICH and UCX do with theirs, each rank removes its own
/// once all have opened it, that is when all ranks of the host have returned from MPI_Init. Nothing else is touched:
/// the path is taken from this process's memory map, and the inode must be the mapped one. Does nothing with MPICH.
void remove_segment_file();
/// Before MPI_Finalize, which reports an error when there is nothing to remove: makes an empty one.
void restore_segment_file();

}  // namespace maniple::mpi_plugin
