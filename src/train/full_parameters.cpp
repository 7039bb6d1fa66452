// Gathers the whole tensors of parameters that ranks divide, and sets them.
#include <cstring>
#include <utility>

#include "comm/base/check.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>
#include <maniple/train/tensor_layout.h>

namespace maniple {
namespace {

using torch::Tensor;
using Extents = std::vector<std::int64_t>;

/// Elements of a tensor that some rank holds, as a box in the tensor's shape (or view).
struct Piece {
  Extents offset, size;
  Tensor elements;  ///< contiguous
};

const Extents& view_of(const TensorLayout& layout) {
  return layout.shard.view.empty() ? layout.shard.shape : layout.shard.view;
}

Tensor box_in(Tensor whole, const Extents& offset, const Extents& size) {
  for (std::size_t d = 0; d < offset.size(); ++d)
    whole = whole.narrow(static_cast<std::int64_t>(d), offset[d], size[d]);
  return whole;
}

/// Offsets and sizes of all pieces, encoded for other ranks.
std::string described(const std::vector<Piece>& pieces) {
  std::vector<std::int64_t> numbers;
  for (const Piece& piece : pieces) {
    numbers.insert(numbers.end(), piece.offset.begin(), piece.offset.end());
    numbers.insert(numbers.end(), piece.size.begin(), piece.size.end());
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::int64_t)};
}

std::vector<Piece> parsed(const std::string& text, std::size_t dimensions) {
  std::vector<std::int64_t> numbers(text.size() / sizeof(std::int64_t));
  std::memcpy(numbers.data(), text.data(), numbers.size() * sizeof(std::int64_t));
  std::vector<Piece> pieces;
  for (auto at = numbers.begin(); at != numbers.end(); at += 2 * static_cast<std::ptrdiff_t>(dimensions)) {
    const auto middle = at + static_cast<std::ptrdiff_t>(dimensions);
    pieces.push_back({{at, middle}, {middle, middle + static_cast<std::ptrdiff_t>(dimensions)}, {}});
  }
  return pieces;
}

std::int64_t elements_of(const Extents& size) {
  std::int64_t count = 1;
  for (const std::int64_t extent : size) count *= extent;
  return count;
}

/// The pieces of all ranks of the group. Collective.
std::vector<Piece> gathered(ProcessGroup& group, const std::vector<Piece>& own, const Tensor& like) {
  std::vector<Tensor> flat;
  for (const Piece& piece : own) flat.push_back(piece.elements.reshape({-1}));
  const Tensor mine = torch::cat(flat).contiguous();
  std::vector<Piece> pieces;
  std::vector<std::size_t> bytes;
  for (const std::string& text : group.all_gather_objects(described(own), {}, public_place())) {
    std::int64_t count = 0;
    for (Piece& piece : parsed(text, own.front().offset.size())) {
      count += elements_of(piece.size);
      pieces.push_back(std::move(piece));
    }
    bytes.push_back(count * like.element_size());
  }
  std::int64_t total = 0;
  for (const Piece& piece : pieces) total += elements_of(piece.size);
  const Tensor all = torch::empty({total}, like.options().requires_grad(false));
  const Device device = like.is_cpu() ? Device{} : Device::cuda(like.get_device());
  group.all_gather(ConstBuffer{mine.data_ptr(), mine.nbytes(), DType::uint8, device},
                   Buffer{all.data_ptr(), all.nbytes(), DType::uint8, device}, bytes,
                   {.stream = current_stream_on(device)}, public_place());
  std::int64_t at = 0;
  for (Piece& piece : pieces) {
    const std::int64_t count = elements_of(piece.size);
    piece.elements = all.narrow(0, at, count).view(piece.size);
    at += count;
  }
  return pieces;
}

Tensor whole_of(const Tensor& parameter, const TensorLayout& layout) {
  const Tensor local = parameter.detach().dim() == 0 ? parameter.detach().reshape({1}) : parameter.detach();
  std::vector<Piece> pieces = {{layout.shard.offset, local.sizes().vec(), local.contiguous()}};
  for (auto group = layout.divided_over.rbegin(); group != layout.divided_over.rend(); ++group) {
    if ((*group)->size() > 1) pieces = gathered(**group, pieces, local);
  }
  const Tensor whole = torch::empty(layout.shard.shape, local.options());
  const Tensor view = whole.view(view_of(layout));
  for (const Piece& piece : pieces) box_in(view, piece.offset, piece.size).copy_(piece.elements);
  return whole;
}

void require_part(const std::string& name, const TensorLayout& layout, const char* function) {
  MANIPLE_REQUIRE(layout.kind != LayoutKind::pipeline_stage && !layout.shard.offset.empty(),
                  "{}: parameter {} is {}, and this rank knows no other stage; use Checkpoint with "
                  "CheckpointOptions::sharded",
                  function, name, layout.text());
}

}  // namespace

std::vector<std::pair<std::string, Tensor>> full_parameters(torch::nn::Module& module, int only_rank) {
  const PublicCall call("full_parameters, which all ranks call");
  const torch::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters()) {
    const TensorLayout layout = layout_of(item.value());
    if (layout.divided()) require_part(item.key(), layout, "full_parameters");
  }
  std::vector<std::pair<std::string, Tensor>> result;
  for (const auto& item : module.named_parameters()) {
    const TensorLayout layout = layout_of(item.value());
    bool wanted = true;
    for (const auto& group : layout.divided_over) wanted = wanted && (only_rank < 0 || group->rank() == only_rank);
    Tensor whole = layout.divided() ? whole_of(item.value(), layout) : item.value().detach().clone();
    if (wanted) result.emplace_back(item.key(), std::move(whole));
  }
  return result;
}

void set_full_parameters(torch::nn::Module& module, const std::vector<std::pair<std::string, Tensor>>& parameters) {
  const torch::NoGradGuard no_grad;
  const auto named = module.named_parameters();
  // Everything is checked before anything is changed.
  for (const auto& [name, tensor] : parameters) {
    const Tensor* parameter = named.find(name);
    MANIPLE_REQUIRE(parameter != nullptr, "set_full_parameters: the module has no parameter {}", name);
    const TensorLayout layout = layout_of(*parameter);
    if (layout.divided()) require_part(name, layout, "set_full_parameters");
    const auto shape = layout.divided() ? layout.shard.shape : parameter->sizes().vec();
    MANIPLE_REQUIRE(tensor.defined() && tensor.sizes().vec() == shape,
                    "set_full_parameters: {} has shape [{}] here, the module's [{}]", name,
                    tensor.defined() ? joined(tensor.sizes()) : "", joined(shape));
  }
  for (const auto& [name, tensor] : parameters) {
    Tensor parameter = *named.find(name);
    const TensorLayout layout = layout_of(parameter);
    if (!layout.divided()) {
      parameter.copy_(tensor);
      continue;
    }
    const auto size = parameter.dim() == 0 ? Extents{1} : parameter.sizes().vec();
    parameter.copy_(box_in(tensor.reshape(view_of(layout)), layout.shard.offset, size).reshape(parameter.sizes()));
  }
}

}  // namespace maniple
