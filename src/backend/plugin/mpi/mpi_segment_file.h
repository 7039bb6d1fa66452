// The file by which Open MPI's ranks of a host share memory (/dev/shm/vader_segment.HOST.UID.JOB.RANK, 4 MiB). It is removed in
// MPI_Finalize, so a rank that is killed, or ends without, would leave it behind for ever. As MPICH and UCX do with theirs, it is
// removed as soon as all have opened it.
#pragma once

namespace maniple::mpi_engine {

/// When all ranks of the host are through MPI_Init, in which they open each other's. Removes that of this rank.
void remove_segment_file();

/// Before MPI_Finalize, which complains when there is nothing to remove.
void put_back_segment_file();

}  // namespace maniple::mpi_engine
