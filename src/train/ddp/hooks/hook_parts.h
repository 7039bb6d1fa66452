// What lossy hooks are made of: error feedback and the count of bytes sent (comm_hooks.cpp), numbers as 8-bit integers
// (int8.cpp), orthonormal columns (power_sgd.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/train/comm_hooks.h>

namespace maniple {

/// Error feedback: what a hook left out of a gradient on this rank, to be added to the next one. One flat tensor for
/// each bucket, laid out as the bucket is. Each parameter's part can be saved and loaded by name, so that it survives a
/// restart with other buckets.
class ErrorFeedback {
 public:
  using Named = std::map<std::string, torch::Tensor>;
  static constexpr std::string_view kPrefix = "error/";  ///< of the names in a hook's state

  /// The bucket's errors, of `dtype`; zeros at first, or what was loaded for its parameters. Throws InvalidArgument,
  /// naming the parameter, if that has another shape.
  torch::Tensor& of(const GradBucket& bucket, torch::ScalarType dtype);

  /// Collective: every rank's errors become the average of all.
  void average(ProcessGroup& group);

  Named copies() const;
  void load(Named named);

 private:
  struct One {
    torch::Tensor flat;
    std::vector<std::pair<std::string, torch::Tensor>> parts;  // views of it
  };
  std::map<int, One> buckets_;
  Named loaded_;  // for buckets that no backward has used yet
};

/// A view of `flat`, which is laid out as the bucket's buffer, in the place and shape of its i-th gradient.
torch::Tensor part_of(const torch::Tensor& flat, const GradBucket& bucket, std::size_t i);

/// What a rank of n sends in an all_reduce of so many bytes.
inline std::uint64_t all_reduce_sends(std::uint64_t bytes, int n) noexcept {
  return 2 * bytes * static_cast<std::uint64_t>(n - 1) / static_cast<std::uint64_t>(n);
}

inline void count_plain(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.plain_bytes += all_reduce_sends(bytes, n);
}

inline void count_all_reduce(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.sent_bytes += all_reduce_sends(bytes, n);
}

// Numbers as 8-bit integers with a scale for each block; without LibTorch.
//
// A block of B numbers is coded as a scale (float32) and B signed bytes: x = scale * byte. The last block may be short;
// it is coded as if zeros followed. A block with a number that is not finite has the scale NaN, so that it decodes to
// NaNs.

/// Blocks below this magnitude count as zeros: their scale would not be a normal number.
inline constexpr float kSmallestBlock = 1.5e-36f;

constexpr std::size_t blocks_of(std::size_t numbers, std::size_t block) noexcept {
  return (numbers + block - 1) / block;
}

/// Bytes of so many coded blocks: all scales, then all bytes.
constexpr std::size_t coded_bytes(std::size_t blocks, std::size_t block) noexcept { return blocks * (4 + block); }

/// `coded` has coded_bytes(blocks_of(numbers.size(), block), block) bytes.
void quantize_blocks(std::span<const float> numbers, std::size_t block, std::span<std::uint8_t> coded);

/// Adds the coded numbers to `numbers`, which has as many as were coded.
void add_quantized(std::span<const std::uint8_t> coded, std::size_t block, std::span<float> numbers);

// The same by tensor operations, for tensors on a GPU (any device will do): a block is a row of its scale and its
// bytes, the rows stand one after the other. Nothing is waited for.

/// One-dimensional, float32.
torch::Tensor quantized_rows(const torch::Tensor& numbers, std::int64_t block);
void add_quantized_rows(const torch::Tensor& coded, std::int64_t block, const torch::Tensor& numbers);

// Orthonormal columns, by the Gram-Schmidt process in float64, each column projected twice.
//
// A column that depends on those before it (all of it but rounding lies in their span) is replaced by a random
// direction that does not, as a QR decomposition would complete the basis: so the columns span what they spanned
// before, and are orthonormal whatever the input. The same input gives the same output on all ranks.

/// In place. `matrix` has no more columns than rows, is float32 or float64 and row-major. `epsilon` is added to the
/// length that a column is divided by.
void orthogonalize(const torch::Tensor& matrix, double epsilon, std::uint64_t seed);

/// The same by tensor operations, for a matrix on a GPU (any device will do), without waiting for it. Whether a column
/// depends on those before it is a number there, so what would replace it is always computed, and one of the two is
/// taken. The replacements are waves of different frequencies, which need no host either.
void orthogonalize_by_tensors(const torch::Tensor& matrix, double epsilon);

/// Numbers in [-1, 1) that depend on the seed alone.
torch::Tensor random_matrix(std::int64_t rows, std::int64_t columns, torch::ScalarType dtype, std::uint64_t seed);

}  // namespace maniple
