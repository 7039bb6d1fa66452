#include <maniple/train/prefetch.h>

#include <torch/torch.h>

#include "comm/base/check.h"
#include "train/tensor/device.h"

namespace maniple::detail {

// A GPU gets a stream for the copies. Other devices that LibTorch supports use plain copies.
Prefetcher::Prefetcher(torch::Device device, const PrefetchOptions& options) : device_(device), options_(options) {
  MANIPLE_REQUIRE(options.batches >= 1, "prefetch_to: {} batches are to be read ahead; expected 1 or more",
                  options.batches);
  if (!device.is_cuda()) return;
  device_ = torch::empty({0}, torch::TensorOptions(device)).device();  // resolves the index of the current device
  stream_ = std::make_shared<CopyStream>(device_);
}

std::shared_ptr<void> Prefetcher::start(std::vector<torch::Tensor>& tensors) const {
  if (stream_) return static_cast<CopyStream*>(stream_.get())->start(tensors);
  for (torch::Tensor& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.to(device_);
  }
  return nullptr;
}

void Prefetcher::finish(const std::shared_ptr<void>& started, const std::vector<torch::Tensor>& tensors) const {
  if (stream_) static_cast<CopyStream*>(stream_.get())->wait(started, tensors);
}

}  // namespace maniple::detail
