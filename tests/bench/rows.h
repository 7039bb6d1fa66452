// Rows for tests of what is made of rows.
#pragma once

#include <string>

#include "bench/row.h"

namespace maniple::bench {

inline Row row_of(const std::string& backend, const std::string& buffer, int ranks, std::uint64_t bytes,
                  double median_us) {
  Row row;
  row.op = "all_reduce";
  row.backend = backend;
  row.transport = "shm";
  row.buffer = buffer;
  row.ranks = ranks;
  row.bytes = bytes;
  row.median_us = median_us;
  row.p99_us = median_us * 1.2;
  row.dtype = "float32";
  row.algorithm = "auto";
  set_bandwidth(row);
  return row;
}

}  // namespace maniple::bench
