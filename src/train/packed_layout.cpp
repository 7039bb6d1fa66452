#include "train/packed_layout.h"

#include <algorithm>

#include "train/tensor/device.h"
#include "train/tensor/torch_compat.h"

namespace maniple {

RowRange rows_of(std::int64_t rows, int parts, int part) {
  const std::int64_t most = (rows + parts - 1) / parts;
  const std::int64_t begin = std::min(rows, most * part);
  return {begin, std::min(rows, begin + most) - begin};
}

PackedLayout::PackedLayout(std::size_t element_bytes, std::size_t alignment)
    : element_bytes_(element_bytes), step_(std::max<std::size_t>(1, alignment / element_bytes)) {}

PackedLayout PackedLayout::by_rows(std::size_t element_bytes, std::size_t head, std::span<const Rows> tensors,
                                   int ranks) {
  PackedLayout layout(element_bytes);
  layout.divided_ = tensors.size();
  layout.pieces_.reserve(tensors.size() * ranks);
  std::vector<std::size_t> ends;
  for (int rank = 0; rank < ranks; ++rank) {
    layout.append(head);
    for (const Rows& tensor : tensors) {
      const RowRange rows = rows_of(tensor.rows, ranks, rank);
      const std::size_t count = rows.count * tensor.row_elements;
      layout.pieces_.push_back(
          {static_cast<std::size_t>(rows.begin * tensor.row_elements), count, layout.append(count)});
    }
    ends.push_back(layout.total_);
  }
  layout.cut(std::move(ends));
  return layout;
}

std::size_t PackedLayout::append(std::size_t elements) {
  const std::size_t offset = total_;
  total_ += (elements + step_ - 1) / step_ * step_;
  return offset;
}

std::size_t PackedLayout::padded(std::size_t i) const {
  return (i + 1 == tensors_.size() ? total_ : tensors_[i + 1].offset) - tensors_[i].offset;
}

void PackedLayout::cut(std::vector<std::size_t> ends) {
  ends_ = std::move(ends);
  counts_.resize(ends_.size());
  for (std::size_t part = 0; part < ends_.size(); ++part) counts_[part] = part_end(part) - part_begin(part);
}

std::vector<std::size_t> PackedLayout::part_bytes() const {
  std::vector<std::size_t> bytes;
  for (const std::size_t count : counts_) bytes.push_back(count * element_bytes_);
  return bytes;
}

PackedLayout::Piece PackedLayout::piece(std::size_t part, std::size_t i) const {
  if (divided_ != 0) return pieces_[part * divided_ + i];
  const Extent& tensor = tensors_[i];
  const std::size_t begin = std::max(part_begin(part), tensor.offset);
  const std::size_t end = std::min(part_end(part), tensor.offset + tensor.count);
  if (end <= begin) return {};
  return {begin - tensor.offset, end - begin, begin};
}

torch::Tensor PackedLayout::view(const RegisteredMemory& memory, std::size_t base, std::size_t i,
                                 const torch::Tensor& like) const {
  const auto strides = is_dense(like) ? like.strides().vec() : torch::empty(like.sizes(), torch::kMeta).strides().vec();
  return tensor_on(memory, base + offset(i) * element_bytes_, like.sizes(), strides, like.options());
}

}  // namespace maniple
