// Boxes describe which elements of a tensor a rank holds, a file contains, or a reader requests.
//
// A box is a range in each dimension of a *view* of the tensor. A view is any shape with the same elements in the same
// (row-major) order. So one description covers every way to divide a tensor: rows and columns are boxes in the tensor's
// own shape; a flat range of elements, which may begin and end inside a row, is a box in the view of one dimension.
// Boxes of different views are compared run by run; a run is a range of the box's elements that are contiguous in the
// tensor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace maniple {

using Extents = std::vector<std::int64_t>;

/// The number of elements. The product of the extents must not overflow (see tensor_bytes in safetensors.h).
std::int64_t elements_of(const Extents& extents);

struct TensorBox {
  Extents view;
  Extents offset;  ///< the first element's index in each dimension of the view
  Extents size;

  static TensorBox whole(const Extents& shape) { return {shape, Extents(shape.size(), 0), shape}; }
  /// The range of `count` elements from `begin` on, in a tensor of `all` elements.
  static TensorBox flat(std::int64_t all, std::int64_t begin, std::int64_t count) { return {{all}, {begin}, {count}}; }

  std::int64_t count() const { return elements_of(size); }
  friend bool operator==(const TensorBox&, const TensorBox&) = default;
};

/// Whether the box lies inside its view and the view's extents are not negative.
bool lies_inside(const TensorBox& box);
/// The boxes must lie inside the same view.
bool overlap(const TensorBox& a, const TensorBox& b);

/// Checks that boxes of one view cover it without overlap. Returns the error text, or an empty string.
std::string cover_error(const std::vector<const TensorBox*>& boxes, const Extents& view);

/// Cuts the box into at most `parts` consecutive parts of nearly equal size.
std::vector<TensorBox> cut_box(const TensorBox& box, std::int64_t parts);

/// The runs of a box. The box must lie inside its view.
class BoxRuns {
 public:
  explicit BoxRuns(const TensorBox& box);

  struct Run {
    std::int64_t begin;   ///< offset in the tensor
    std::int64_t length;  ///< in elements
    std::int64_t at;      ///< offset in the box, in row-major order
  };
  /// The rest of the run that contains `position` of the tensor, or else the next run; nullopt after the last.
  std::optional<Run> from(std::int64_t position) const;

 private:
  const TensorBox box_;
  std::size_t inner_ = 0;  // in the dimensions after this one the box covers the whole view
  Extents view_strides_, box_strides_;
  bool empty_ = false;
  mutable Extents place_;
};

/// Calls f(offset in a, offset in b, length) for each range of elements that two boxes of one tensor have in common.
/// Returns the total number of common elements.
template <class F>
std::int64_t for_each_common(const BoxRuns& a, const BoxRuns& b, const F& f) {
  std::int64_t common = 0;
  for (std::int64_t position = 0;;) {
    const auto x = a.from(position);
    if (!x) return common;
    const auto y = b.from(x->begin);
    if (!y) return common;
    position = y->begin;
    if (y->begin >= x->begin + x->length) continue;
    const std::int64_t skipped = y->begin - x->begin;
    const std::int64_t length = std::min(x->length - skipped, y->length);
    f(x->at + skipped, y->at, length);
    common += length;
    position = y->begin + length;
  }
}

}  // namespace maniple
