// Boxes: which elements of a tensor a rank holds, a file has, or somebody wants to read.
//
// A box is a range in each dimension of a *view* of the tensor, that is of any shape with as many elements in the same
// (row-major) order. One description serves all ways to divide a tensor: rows and columns are boxes in its own shape; a
// flat range of its elements, which may begin and end in the middle of a row, is a box in the view of one dimension.
// Boxes of different views are compared run by run: a run is a stretch of elements of the box that follow each other in
// the whole.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace maniple {

using Extents = std::vector<std::int64_t>;

/// The number of elements. The extents must be such that it fits (see tensor_bytes in safetensors.h).
std::int64_t elements_of(const Extents& extents);

struct TensorBox {
  Extents view;
  Extents offset;  ///< of its first element, in each dimension of the view
  Extents size;

  static TensorBox whole(const Extents& shape) { return {shape, Extents(shape.size(), 0), shape}; }
  /// `count` elements from `begin` on of a tensor that has `all`.
  static TensorBox flat(std::int64_t all, std::int64_t begin, std::int64_t count) { return {{all}, {begin}, {count}}; }

  std::int64_t count() const { return elements_of(size); }
  friend bool operator==(const TensorBox&, const TensorBox&) = default;
};

/// Whether it lies inside its view, whose extents are not negative.
bool lies_inside(const TensorBox& box);
/// Of boxes that lie inside one view.
bool overlap(const TensorBox& a, const TensorBox& b);

/// What is wrong with boxes of one view that should be the whole without overlap; empty if nothing is.
std::string trouble_of_cover(const std::vector<const TensorBox*>& boxes, const Extents& view);

/// About equal parts, at most so many, one after the other in the box.
std::vector<TensorBox> cut_box(const TensorBox& box, std::int64_t parts);

/// The runs of a box, which must lie inside its view.
class BoxRuns {
 public:
  explicit BoxRuns(const TensorBox& box);

  struct Run {
    std::int64_t begin;   ///< in the whole
    std::int64_t length;  ///< in elements
    std::int64_t at;      ///< in the box, whose elements are in row-major order
  };
  /// The rest of the run that `position` of the whole is in, or else the next one; nullopt behind the last.
  std::optional<Run> from(std::int64_t position) const;

 private:
  const TensorBox box_;
  std::size_t inner_ = 0;  // from the dimension behind this one on the box is as large as the view
  Extents view_strides_, box_strides_;
  bool empty_ = false;
  mutable Extents place_;
};

/// Calls f(element of a, element of b, how many) for each stretch that boxes of one tensor have in common; elements are
/// counted in each box. Returns how many elements they have in common.
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
