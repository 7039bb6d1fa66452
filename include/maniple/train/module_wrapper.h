// The common base of DistributedDataParallel and DataParallel: a torch::nn::Module whose only child, registered as
// "module", is the wrapped module.
//
// parameters() returns the wrapped module's parameters. named_parameters() and archives use names such as
// "module.fc1.weight", as in PyTorch. train(), eval(), zero_grad(), torch::save and torch::load apply to the wrapped
// module.
#pragma once

#include <memory>

#include <torch/torch.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {
namespace detail {

/// The module class of a TORCH_MODULE holder, or the class itself.
template <class T, bool holder = torch::detail::is_module_holder<T>::value>
struct ModuleOf {
  using type = T;
};
template <class T>
struct ModuleOf<T, true> {
  using type = typename T::ContainedType;
};

class ModuleWrapper : public torch::nn::Module {
 public:
  bool is_training() const noexcept override;  ///< of the wrapped module

  /// Throws InvalidArgument unless the module already has that device and dtype: hooks, buckets and replicas were made
  /// for the module as it was when wrapped. Convert the module first, then wrap it.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  /// `name` is the wrapper's name, for error messages. Throws InvalidArgument if the module is null.
  ModuleWrapper(const char* name, std::shared_ptr<torch::nn::Module> module);

 private:
  std::shared_ptr<torch::nn::Module> wrapped_;
};

}  // namespace detail
}  // namespace maniple
