// MPI counts in int; what is longer goes in pieces.
#pragma once

#include <algorithm>
#include <cstddef>

namespace maniple::mpi_engine {

/// Calls `body(first, count)` for one piece after the other until all of `count` is done or `body` returns false.
template <class Body>
bool in_pieces(std::size_t count, std::size_t most, Body body) {
  for (std::size_t first = 0; first < count; first += most) {
    if (!body(first, static_cast<int>(std::min(most, count - first)))) return false;
  }
  return true;
}

}  // namespace maniple::mpi_engine
