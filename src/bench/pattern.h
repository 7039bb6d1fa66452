// Inputs that are known everywhere, so that each rank can tell by itself whether its result is right.
//
// Values are small whole numbers that depend on rank and index without a period: a misplaced or stale part shows, and
// sums are exact in every dtype.
#pragma once

#include <cstddef>

#include "bench/work_item.h"

namespace maniple::bench {

/// Writes the input of `rank`: `case.in_count(rank)` elements.
void fill_input(const Case& what, int rank, void* input);

/// How many of the checked elements of `rank`'s output are wrong: all are checked up to 256 Ki elements, beyond that
/// both ends and a sample.
std::size_t count_wrong(const Case& what, int rank, const void* output);

}  // namespace maniple::bench
