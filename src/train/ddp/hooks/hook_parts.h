// Building blocks of lossy hooks: error feedback and traffic counts (comm_hooks.cpp), 8-bit quantization (int8.cpp),
// orthonormal columns (power_sgd.cpp).
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

/// Error feedback: the part of a gradient that a hook left out on this rank, to be added to the next gradient. It is
/// one flat tensor per bucket, with the bucket's layout. Each parameter's part can be saved and loaded by name, so that
/// it survives a restart with other buckets.
class ErrorFeedback {
 public:
  using Named = std::map<std::string, torch::Tensor>;
  static constexpr std::string_view kPrefix = "error/";  ///< prefix of names in a hook's state

  /// The bucket's errors, as `dtype`: initially zeros, or the values loaded for its parameters. Throws InvalidArgument,
  /// naming the parameter, if loaded values have another shape.
  torch::Tensor& of(const GradBucket& bucket, torch::ScalarType dtype);

  /// Replaces every rank's errors by the average over all ranks. Collective.
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

/// A view of `flat`, which has the layout of the bucket's buffer, with the place and shape of the i-th gradient.
torch::Tensor part_of(const torch::Tensor& flat, const GradBucket& bucket, std::size_t i);

/// Bytes that one of `n` ranks sends in an all_reduce of `bytes` bytes.
inline std::uint64_t all_reduce_sends(std::uint64_t bytes, int n) noexcept {
  return 2 * bytes * static_cast<std::uint64_t>(n - 1) / static_cast<std::uint64_t>(n);
}

inline void count_plain(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.plain_bytes += all_reduce_sends(bytes, n);
}

inline void count_all_reduce(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.sent_bytes += all_reduce_sends(bytes, n);
}

// 8-bit quantization with one scale per block; without LibTorch.
//
// A block of B numbers is coded as a scale (float32) and B signed bytes: x = scale * byte. A short last block is coded
// as if zeros followed. A block that contains a number that is not finite has the scale NaN, so it decodes to NaNs.

/// Blocks of smaller magnitude count as zeros: their scale would not be a normal number.
inline constexpr float kSmallestBlock = 1.5e-36f;

constexpr std::size_t blocks_of(std::size_t numbers, std::size_t block) noexcept {
  return (numbers + block - 1) / block;
}

/// Bytes of `blocks` coded blocks: all scales, then all bytes.
constexpr std::size_t coded_bytes(std::size_t blocks, std::size_t block) noexcept { return blocks * (4 + block); }

/// `coded` must have coded_bytes(blocks_of(numbers.size(), block), block) bytes.
void quantize_blocks(std::span<const float> numbers, std::size_t block, std::span<std::uint8_t> coded);

/// Adds the decoded numbers to `numbers`, which must have the size that was coded.
void add_quantized(std::span<const std::uint8_t> coded, std::size_t block, std::span<float> numbers);

// The same by tensor operations, for tensors on a GPU (any device works). A block is a row with its scale and its
// bytes; rows follow one another. The host does not wait.

/// One-dimensional, float32.
torch::Tensor quantized_rows(const torch::Tensor& numbers, std::int64_t block);
void add_quantized_rows(const torch::Tensor& coded, std::int64_t block, const torch::Tensor& numbers);

// Orthonormal columns by the Gram-Schmidt process in float64. Each column is projected twice.
//
// A column that depends on earlier columns (all of it but rounding lies in their span) is replaced by a random
// independent direction, as a QR decomposition would complete the basis. So the result spans at least what the input
// spanned, and is orthonormal for any input. The same input gives the same output on all ranks.

/// In place. `matrix` must be row-major, float32 or float64, with at most as many columns as rows. `epsilon` is added
/// to the length by which a column is divided.
void orthogonalize(const torch::Tensor& matrix, double epsilon, std::uint64_t seed);

/// The same by tensor operations, for a matrix on a GPU (any device works), without waiting for it. The host cannot see
/// whether a column depends on earlier ones, so the replacement is always computed, and the device selects one of the
/// two. Replacements are waves of different frequencies, which need no host either.
void orthogonalize_by_tensors(const torch::Tensor& matrix, double epsilon);

/// Numbers in [-1, 1) that depend only on the seed.
torch::Tensor random_matrix(std::int64_t rows, std::int64_t columns, torch::ScalarType dtype, std::uint64_t seed);

}  // namespace maniple
