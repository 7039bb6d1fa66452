// Copies of a module on several devices, and their updates from the module.
//
// On the module's own device, a replica's parameter is a separate tensor (so that autograd can distinguish the
// replicas) that shares the module's memory. The first replica's buffers share the module's memory as well: the module
// keeps what batch norm writes there. Everything else is a copy, which refresh() updates.
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

  /// Updates the first `count` replicas to the module's current values.
  void refresh(std::size_t count);

  /// The original's parameters that require a gradient now, each once.
  std::vector<torch::Tensor> trained() const;
  /// For each of trained(), the replica's tensors that stand for it: one, or several if the replica does not tie
  /// parameters that the original ties.
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
  std::vector<std::size_t> first_;  // for each parameter: the index where the same tensor appears first
  std::vector<Copy> copies_;
};

}  // namespace maniple
