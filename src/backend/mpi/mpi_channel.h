// A channel of bytes over MPI's point-to-point messages: one tag, packets of up to 64 KiB, copied on both sides. So MPI never
// holds memory of the caller, and a message can be given up at any moment.
#pragma once

#include <memory>

#include "backend/mpi/mpi_runtime.h"

namespace maniple::mpi_engine {

std::unique_ptr<ByteSink> make_sink(MPI_Comm communicator, int peer, int tag);
std::unique_ptr<ByteSource> make_source(MPI_Comm communicator, int peer, int tag);

}  // namespace maniple::mpi_engine
