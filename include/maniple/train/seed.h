// Random numbers that are the same from run to run.
//
//   maniple::seed_all(7, world->rank());   // each rank draws its own numbers; dropout differs between ranks
//   maniple::seed_all(7);                  // every rank draws the same numbers; weights start out equal
//
// The same program, run twice on the same number of ranks, then gives bit-identical weights.
#pragma once

#include <cstdint>

namespace maniple {

/// Seeds LibTorch's generators (CPU, and CUDA where there is one) with a number made from `seed` and `stream`. The same
/// pair always gives the same numbers; different streams are unrelated to each other. Returns what the generators were
/// given.
std::uint64_t seed_all(std::uint64_t seed, std::uint64_t stream = 0);

}  // namespace maniple
