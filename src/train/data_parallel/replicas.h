// Copies of a module on several devices, and how they follow the module.
//
// A replica's parameter on the module's own device is a tensor of its own (so that autograd can distinguish the
// replicas) over the module's memory. The first replica's buffers are over the module's memory as well: what batch norm
// writes there is what stays. All else is a copy, written anew by refresh().
#pragma once

#include <memory>
#include <vector>

#include <torch/torch.h>

#include <maniple/train/data_parallel.h>

namespace maniple {

class Replicas {
 public:
  Replicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options,
           const detail::DataParallelBase::Factory& make);

  torch::nn::Module& original() const noexcept { return *original_; }
  torch::nn::Module& operator[](std::size_t replica) const { return *copies_[replica].module; }

  /// The first `count` replicas become what the module is now.
  void refresh(std::size_t count);

  /// Of the original, each once, those that require a gradient now.
  std::vector<torch::Tensor> trained() const;
  /// Of a replica: the tensor that stands for each of trained(), or several where the replica has not tied what the
  /// original has tied.
  std::vector<std::vector<torch::Tensor>> trained_of(std::size_t replica) const;

 private:
  struct Copy {
    std::shared_ptr<torch::nn::Module> module;
    torch::Device device;
    bool shares_parameters;
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
    std::vector<torch::Tensor> parameters, buffers;
  };
  std::shared_ptr<torch::nn::Module> make_one(std::size_t index, const detail::DataParallelBase::Factory& make) const;
  void require_alike(std::size_t index) const;

  std::shared_ptr<torch::nn::Module> original_;
  std::vector<torch::Device> devices_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<torch::Tensor> parameters_, buffers_;
  std::vector<std::size_t> first_;  // of a parameter: the place where the same tensor appears first
  std::vector<Copy> copies_;
};

}  // namespace maniple
