#include "train/data_parallel/add_gradients.h"

#include "tensor/torch_compat.h"

namespace maniple {
namespace {

using torch::Tensor;

constexpr std::int64_t kLarge = 1 << 16;  // elements: some ten microseconds, more than it costs to wake the threads

/// Nobody else looks at this memory: a gradient may be the same tensor as another's, or a view.
bool is_ours_alone(const Tensor& tensor) {
  return tensor.layout() == torch::kStrided && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         is_dense(tensor);
}

bool can_be_sliced(const Tensor& sum, const std::vector<Tensor>& others) {
  if (sum.numel() < kLarge || !sum.is_cpu()) return false;
  for (const Tensor& other : others) {
    if (other.layout() != torch::kStrided || other.strides() != sum.strides() ||
        other.scalar_type() != sum.scalar_type()) {
      return false;
    }
  }
  return true;
}

/// Slice number `part` of so many, in the order of memory.
Tensor slice(const Tensor& tensor, std::size_t part, std::size_t parts) {
  const auto count = static_cast<std::int64_t>(parts), index = static_cast<std::int64_t>(part);
  const std::int64_t begin = tensor.numel() * index / count, end = tensor.numel() * (index + 1) / count;
  return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

struct Sum {
  Tensor* total;
  std::vector<Tensor> others;
};

}  // namespace

std::vector<Tensor> add_gradients(ReplicaThreads& threads, std::vector<std::vector<Tensor>> addends,
                                  const std::vector<Tensor>& parameters) {
  std::vector<Tensor> sums(addends.size());
  std::vector<Sum> large;
  for (std::size_t k = 0; k < addends.size(); ++k) {
    std::vector<Tensor>& own = addends[k];
    if (own.empty()) continue;
    const torch::Device device = parameters[k].device();
    Tensor first = std::move(own[0]);
    std::vector<Tensor> others;
    for (std::size_t i = 1; i < own.size(); ++i) others.push_back(std::move(own[i]).to(device));
    sums[k] = first.device() == device ? std::move(first) : first.to(device);
    first.reset();
    if (others.empty()) continue;
    if (!is_ours_alone(sums[k])) {
      for (const Tensor& other : others) sums[k] = sums[k] + other;
    } else if (can_be_sliced(sums[k], others)) {
      large.push_back({&sums[k], std::move(others)});
    } else {
      for (const Tensor& other : others) sums[k].add_(other);
    }
  }
  if (large.empty()) return sums;
  threads.run(threads.size(), "the addition of gradients", [&](std::size_t part) {
    for (const Sum& sum : large) {
      for (const Tensor& other : sum.others) {
        slice(*sum.total, part, threads.size()).add_(slice(other, part, threads.size()));
      }
    }
  });
  return sums;
}

}  // namespace maniple
