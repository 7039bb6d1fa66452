// Orthonormal columns, by the Gram-Schmidt process in float64, each column projected twice.
//
// A column that depends on those before it (all of it but rounding lies in their span) is replaced by a random direction
// that does not, as a QR decomposition would complete the basis: so the columns span what they spanned before, and are
// orthonormal whatever the input. The same input gives the same output on all ranks.
#pragma once

#include <cstdint>

#include <torch/types.h>

namespace maniple {

/// In place. `matrix` has no more columns than rows, is float32 or float64 and row-major. `epsilon` is added to the length
/// that a column is divided by.
void orthogonalize(const torch::Tensor& matrix, double epsilon, std::uint64_t seed);

/// Numbers in [-1, 1) that depend on the seed alone.
torch::Tensor random_matrix(std::int64_t rows, std::int64_t columns, torch::ScalarType dtype, std::uint64_t seed);

}  // namespace maniple
