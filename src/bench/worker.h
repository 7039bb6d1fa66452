// What a `bench-worker` process does: one rank of a measurement of Maniple itself.
#pragma once

#include <string>

#include "bench/work_item.h"

namespace maniple::bench {

/// Initialises as `rank` with the init_method `rendezvous`, measures, and prints rows on rank 0. With the transport loopback
/// it runs all ranks as threads instead and needs neither.
void run_worker(const WorkItem& item, int rank, const std::string& rendezvous);

}  // namespace maniple::bench
