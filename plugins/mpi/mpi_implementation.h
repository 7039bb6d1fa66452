// The differences between Open MPI and MPICH: transports, launchers, files.
#pragma once

#include "comm/backend/plugin/plugin.h"

namespace maniple::mpi_plugin {

/// Whether mpirun started more ranks on this host than there are cores.
bool shares_cores();

/// Call before MPI_Init: keeps MPI from ending the process when a peer is gone, and avoids slow transports.
void choose_transports();

/// Call after MPI_Init: records the launcher's signal that a rank is lost, if the launcher sends one.
void watch_for_losses();

/// Call before MPI_Finalize, when all ranks are about to exit: keeps MPI_Finalize from waiting for replies.
void drop_connections();

/// How long a rank waits, before MPI_Finalize, for the other ranks to be about to exit. Evaluated again during the
/// wait.
///
/// Ranks may end at very different times, for instance when one of them writes a file for minutes. A launcher that ends
/// the job when a rank is lost also ends the wait; with other launchers, this limit does.
Deadline::Duration exit_limit();

/// Removes this rank's shared-memory file of Open MPI early, so that it cannot be left behind.
///
/// Each of Open MPI's ranks shares memory with the other ranks on its host through a file of 4 MiB,
/// /dev/shm/vader_segment.HOST.UID.JOB.RANK, which MPI_Finalize removes. A rank that is killed, or that ends without
/// MPI_Finalize because another rank was lost, would leave its file behind, and a host would run out of memory after
/// some failed jobs. The only remedy among Open MPI 4's settings moves the files to a disk. So, as MPICH and UCX do
/// with their files, each rank removes its own file once all ranks on the host have opened it, which is when they have
/// returned from MPI_Init. No other file is touched: the path comes from this process's memory map, and the inode must
/// be the mapped one. Does nothing with MPICH.
void remove_segment_file();
/// Call before MPI_Finalize, which reports an error when the file is missing: creates an empty file.
void restore_segment_file();

}  // namespace maniple::mpi_plugin
