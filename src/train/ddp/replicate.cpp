#include "train/ddp/replicate.h"

#include <cstring>

#include "tensor/staged.h"
#include "tensor/torch_compat.h"

namespace maniple {
namespace {

constexpr std::size_t kSmall = 256 * 1024;  // bytes of a tensor that is packed

}  // namespace

Replicator::Replicator(std::shared_ptr<ProcessGroup> group, std::vector<torch::Tensor> tensors)
    : group_(std::move(group)), tensors_(std::move(tensors)) {}

void Replicator::copy_from(int root) {
  if (group_->size() == 1 || tensors_.empty()) return;
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> small;
  for (const torch::Tensor& tensor : tensors_) {
    if (!is_dense(tensor)) {
      const Staged staged(tensor, Access::read_write, {"DistributedDataParallel", "tensor"});
      group_->broadcast(staged.buffer(), root);
      staged.write_back();
    } else if (tensor.nbytes() > kSmall) {
      group_->broadcast({tensor.data_ptr(), tensor.nbytes(), DType::uint8}, root);
    } else {
      small.push_back(tensor);
    }
  }
  broadcast_packed(small, root);
}

void Replicator::broadcast_packed(const std::vector<torch::Tensor>& small, int root) {
  std::size_t bytes = 0;
  for (const torch::Tensor& tensor : small) bytes += tensor.nbytes();
  if (bytes == 0) return;
  if (pack_.size() < bytes) pack_ = group_->allocate(bytes);
  auto* packed = static_cast<std::byte*>(pack_.data());
  const auto each = [&](auto&& copy) {
    std::size_t at = 0;
    for (const torch::Tensor& tensor : small) {
      if (tensor.nbytes() != 0) copy(packed + at, tensor.data_ptr(), tensor.nbytes());
      at += tensor.nbytes();
    }
  };
  if (group_->rank() == root) each([](void* pack, void* own, std::size_t n) { std::memcpy(pack, own, n); });
  group_->broadcast({packed, bytes, DType::uint8}, root);
  if (group_->rank() != root) each([](void* pack, void* own, std::size_t n) { std::memcpy(own, pack, n); });
}

}  // namespace maniple
