#include "train/packed_layout.h"

#include <algorithm>

#include "tensor/device.h"
#include "tensor/torch_compat.h"

namespace maniple {

PackedLayout::PackedLayout(std::size_t element_bytes, std::size_t alignment)
    : element_bytes_(element_bytes), step_(std::max<std::size_t>(1, alignment / element_bytes)) {}

void PackedLayout::add(std::size_t elements) {
  tensors_.push_back({total_, elements});
  total_ += (elements + step_ - 1) / step_ * step_;
}

std::size_t PackedLayout::padded(std::size_t i) const {
  return (i + 1 == tensors_.size() ? total_ : tensors_[i + 1].offset) - tensors_[i].offset;
}

void PackedLayout::cut(std::vector<std::size_t> ends) { ends_ = std::move(ends); }

std::vector<std::size_t> PackedLayout::part_bytes() const {
  std::vector<std::size_t> bytes;
  for (std::size_t part = 0; part < ends_.size(); ++part)
    bytes.push_back((part_end(part) - part_begin(part)) * element_bytes_);
  return bytes;
}

PackedLayout::Piece PackedLayout::piece(std::size_t part, std::size_t i) const {
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
