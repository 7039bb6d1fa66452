// The two halves of the ring algorithms. Everyone sends only to the next rank and receives only from the one before.
//
// Words: the buffer is cut into one *slice* for each rank, a slice into *chunks*. In n-1 *steps* a slice travels once
// round the ring. In the first half each rank adds its own operand to what passes (a *partial result*) until the slice
// arrives complete at its owner; in the second the complete slices travel on as they are. Chunks are passed on as they
// arrive, so a step does not wait for the end of the one before.
//
// Cost of each half, n ranks, buffer of B bytes: n-1 steps; (n-1)/n B sent by each rank and the same received.
// The order of additions for slice j is j+1, j+2, ..., j: fixed, but not the same for all slices.
#pragma once

#include "call/operation.h"
#include "transport/exchange.h"

namespace maniple {

/// Reduces the slices of `operation.in`; this rank's goes to `own` (may be its place in the input), or stays in scratch
/// when that is null. Returns it. Sends may still be under way: wait_all() before the input is overwritten.
std::span<const std::byte> ring_reduce_slices(Exchange& exchange, const Operation& operation, const Parts& slices,
                                              std::byte* own);

/// Spreads the slices of `all`, of which this rank holds its own.
void ring_gather_slices(Exchange& exchange, std::byte* all, const Parts& slices, std::size_t element);

}  // namespace maniple
