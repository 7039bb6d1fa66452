// A channel of bytes over MPI's point-to-point messages: one tag, packets of up to 64 KiB, copied on both sides. So MPI never
// holds memory of the caller, and a message can be given up at any moment.
#pragma once

#include <memory>

#include "backend/plugin/mpi/mpi_leave_notices.h"

namespace maniple::mpi_engine {

/// Where a channel leads.
struct Course {
  MPI_Comm communicator = MPI_COMM_NULL;
  int peer = 0;
  int tag = 0;
  Line& line;
  std::size_t lane = 0;
};

std::unique_ptr<ByteSink> make_sink(const Course& course);
std::unique_ptr<ByteSource> make_source(const Course& course);

}  // namespace maniple::mpi_engine
