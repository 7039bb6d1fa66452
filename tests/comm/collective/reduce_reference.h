// Reductions written as plainly as possible, to hold the kernels against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/collective/reduce/reduce.h"

namespace maniple::test {

using Bytes = std::vector<unsigned char>;

/// `count` elements with everything that may go wrong in it: NaN, infinities, both zeros, subnormals, the ends of the
/// integers' ranges, bytes that are neither 0 nor 1. The same for the same arguments.
Bytes random_elements(DType dtype, std::size_t count, std::uint64_t seed);

Bytes reference_reduction(const Reduction& reduction, const std::vector<Bytes>& sources, std::size_t count);

/// Bit for bit the same, or NaN in both.
bool same_element(DType dtype, const void* a, const void* b);

std::string show_element(DType dtype, const void* element);

}  // namespace maniple::test
