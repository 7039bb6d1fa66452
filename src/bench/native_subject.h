// Maniple as the thing measured: what a `bench-worker` process does.
#pragma once

#include <string>

#include "bench/order.h"

namespace maniple::bench {

/// Joins as `rank` at `rendezvous` (any init_method), measures, and prints rows on rank 0. With the transport loopback
/// it runs all ranks as threads instead and needs neither.
void work_as_rank(const Order& order, int rank, const std::string& rendezvous);

}  // namespace maniple::bench
