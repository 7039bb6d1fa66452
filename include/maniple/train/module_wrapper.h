// What DistributedDataParallel and DataParallel have in common: each is a torch::nn::Module with one child, the module
// that it wraps, registered as "module".
//
// So parameters() are those of the wrapped module; named_parameters() and state in archives have names such as
// "module.fc1.weight", as in PyTorch; train(), eval(), zero_grad(), torch::save and torch::load reach the wrapped
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

  /// Throws InvalidArgument unless the module is on that device, and of that dtype, already: hooks, buckets and
  /// replicas are made for what it was when it was wrapped. Convert the module first, then wrap it.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  /// `name` is that of the wrapper, for messages. Throws InvalidArgument if the module is null.
  ModuleWrapper(const char* name, std::shared_ptr<torch::nn::Module> module);

 private:
  std::shared_ptr<torch::nn::Module> wrapped_;
};

}  // namespace detail
}  // namespace maniple
