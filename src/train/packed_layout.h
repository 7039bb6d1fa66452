// The layout of tensors packed into one flat buffer, and which elements of each tensor fall into which part of the
// buffer.
//
//   PackedLayout layout(sizeof(float));
//   for (const torch::Tensor& tensor : tensors) layout.add(tensor.numel());
//   const RegisteredMemory memory = group.allocate(layout.bytes());
//   layout.view(memory, 0, i, tensors[i]).copy_(tensors[i]);
//
// Offsets, counts and totals are in elements. A buffer with several dtypes is laid out in bytes, as elements of one
// byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/registered_memory.h>

namespace maniple {

/// The size of a cache line. Vector instructions load aligned data, and two ranks never write to the same line.
inline constexpr std::size_t kPackedAlignment = 64;

/// A range of indices in dimension 0.
struct RowRange {
  std::int64_t begin = 0, count = 0;
};
/// The rows of part `part`, cut as torch::chunk does; the last parts may have fewer rows, or none.
RowRange rows_of(std::int64_t rows, int parts, int part);

class PackedLayout {
 public:
  /// The shape of a tensor that is divided by rows.
  struct Rows {
    std::int64_t rows = 0, row_elements = 0;
  };
  /// The elements of a tensor that lie in one part of the buffer.
  struct Piece {
    std::size_t begin = 0, count = 0;  ///< in the tensor
    std::size_t offset = 0;            ///< of the first element, in the buffer
  };

  /// Every tensor begins at a multiple of `alignment` bytes. With alignment 1 there is no padding.
  explicit PackedLayout(std::size_t element_bytes, std::size_t alignment = kPackedAlignment);
  PackedLayout() : PackedLayout(1) {}

  /// A buffer with one part per rank. A part holds `head` elements of another kind, then the rank's rows of each
  /// tensor; both begin at multiples of kPackedAlignment. Such a layout has parts and pieces, but no whole tensors.
  static PackedLayout by_rows(std::size_t element_bytes, std::size_t head, std::span<const Rows> tensors, int ranks);

  void add(std::size_t elements) { tensors_.push_back({append(elements), elements}); }

  std::size_t offset(std::size_t i) const { return tensors_[i].offset; }
  std::size_t padded(std::size_t i) const;  ///< elements of tensor i, including the padding after it
  std::size_t total() const noexcept { return total_; }
  std::size_t bytes() const noexcept { return total_ * element_bytes_; }
  std::size_t element_bytes() const noexcept { return element_bytes_; }
  std::size_t alignment() const noexcept { return step_; }  ///< in elements

  /// Cuts the buffer into parts. Each part ends before the element with the given index; `ends` is ascending and its
  /// last entry is total(). Replaces an earlier cut.
  void cut(std::vector<std::size_t> ends);

  std::size_t part_begin(std::size_t part) const { return part == 0 ? 0 : ends_[part - 1]; }
  std::size_t part_end(std::size_t part) const { return ends_[part]; }
  const std::vector<std::size_t>& part_counts() const noexcept { return counts_; }
  std::vector<std::size_t> part_bytes() const;
  /// The elements of tensor i that lie in a part; count is 0 if there are none.
  Piece piece(std::size_t part, std::size_t i) const;

  /// Tensor i in a buffer that begins at byte `base` of the memory. It has the sizes and options of `like`. It has the
  /// strides of `like` if those leave no gaps, otherwise it is contiguous.
  torch::Tensor view(const RegisteredMemory& memory, std::size_t base, std::size_t i, const torch::Tensor& like) const;

 private:
  struct Extent {
    std::size_t offset, count;
  };

  std::size_t append(std::size_t elements);  // returns the tensor's offset

  std::size_t element_bytes_, step_;
  std::size_t total_ = 0;
  std::vector<Extent> tensors_;
  std::vector<std::size_t> ends_, counts_;  // per part
  std::vector<Piece> pieces_;               // by_rows: by part, then by tensor
  std::size_t divided_ = 0;                 // by_rows: number of tensors
};

}  // namespace maniple
