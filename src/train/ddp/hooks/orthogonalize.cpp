#include "train/ddp/hooks/orthogonalize.h"

#include <cmath>
#include <vector>

#include "base/check.h"
#include "train/data/split_mix.h"

namespace maniple {
namespace {

using Column = std::vector<double>;

double product(const Column& a, const Column& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Takes away what lies in the span of the columns before; twice, because the first pass leaves its own rounding.
void project(Column& column, const std::vector<Column>& before) {
  for (int pass = 0; pass < 2; ++pass) {
    for (const Column& one : before) {
      const double along = product(one, column);
      for (std::size_t i = 0; i < column.size(); ++i) column[i] -= along * one[i];
    }
  }
}

template <class T>
void orthogonalize_as(T* data, std::size_t rows, std::size_t columns, double epsilon, std::uint64_t seed) {
  const double rounding = sizeof(T) == 4 ? 1e-6 : 1e-14;
  SplitMix random(seed);
  std::vector<Column> units;
  for (std::size_t c = 0; c < columns; ++c) {
    Column column(rows);
    for (std::size_t r = 0; r < rows; ++r) column[r] = static_cast<double>(data[r * columns + c]);
    const double before = std::sqrt(product(column, column));
    project(column, units);
    double length = std::sqrt(product(column, column));
    while (!(length > rounding * before)) {
      for (double& x : column) x = 2 * random.unit() - 1;
      project(column, units);
      length = std::sqrt(product(column, column));
      if (length > 1e-3) break;
    }
    for (double& x : column) x /= length;
    for (std::size_t r = 0; r < rows; ++r) {
      data[r * columns + c] = static_cast<T>(column[r] * (length / (length + epsilon)));
    }
    units.push_back(std::move(column));
  }
}

}  // namespace

void orthogonalize(const torch::Tensor& matrix, double epsilon, std::uint64_t seed) {
  MANIPLE_ASSERT(matrix.is_contiguous() && matrix.size(1) <= matrix.size(0));
  const auto rows = static_cast<std::size_t>(matrix.size(0)), columns = static_cast<std::size_t>(matrix.size(1));
  if (matrix.scalar_type() == torch::kFloat64) {
    orthogonalize_as(matrix.data_ptr<double>(), rows, columns, epsilon, seed);
  } else {
    orthogonalize_as(matrix.data_ptr<float>(), rows, columns, epsilon, seed);
  }
}

torch::Tensor random_matrix(std::int64_t rows, std::int64_t columns, torch::ScalarType dtype, std::uint64_t seed) {
  const torch::Tensor matrix = torch::empty({rows, columns}, torch::TensorOptions(torch::kFloat64));
  SplitMix random(seed);
  double* data = matrix.data_ptr<double>();
  for (std::int64_t i = 0; i < rows * columns; ++i) data[i] = 2 * random.unit() - 1;
  return matrix.to(dtype);
}

}  // namespace maniple
