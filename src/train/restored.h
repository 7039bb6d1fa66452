// What a computation changes for a while: saved before the computation, and restored when a scope ends, also by an
// exception.
//
//   const Restored random{RandomStates(generators)};
//   const Restored buffers{TensorValues(module.buffers())};
//   module.forward(input);  // may draw random numbers and write to buffers
#pragma once

#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace maniple {

/// Calls state.restore() at the end of the scope. Throws what that throws, unless another exception ends the scope.
template <class State>
class Restored {
 public:
  explicit Restored(State state) : state_(std::move(state)) {}
  ~Restored() noexcept(false) {
    try {
      state_.restore();
    } catch (...) {
      if (std::uncaught_exceptions() == before_) throw;
    }
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  State state_;
  int before_ = std::uncaught_exceptions();
};

/// Copies of the values of tensors; undefined tensors are skipped. restore() writes the values back in place and
/// without autograd: views see them too, and graphs that saved a tensor before become invalid.
class TensorValues {
 public:
  TensorValues() = default;
  explicit TensorValues(const std::vector<torch::Tensor>& tensors) {
    for (const torch::Tensor& tensor : tensors) {
      if (tensor.defined()) copies_.emplace_back(tensor, tensor.detach().clone());
    }
  }
  void restore() const {
    const torch::NoGradGuard no_grad;
    for (const auto& [tensor, copy] : copies_) tensor.copy_(copy);
  }

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> copies_;  // the tensor and its copy
};

inline torch::Tensor random_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state().clone();
}
inline void set_random_state(at::Generator generator, const torch::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

class RandomStates {
 public:
  RandomStates() = default;
  explicit RandomStates(std::vector<at::Generator> generators) : generators_(std::move(generators)) {
    for (const at::Generator& one : generators_) states_.push_back(random_state(one));
  }
  void restore() const {
    for (std::size_t i = 0; i < generators_.size(); ++i) set_random_state(generators_[i], states_[i]);
  }
  RandomStates now() const { return RandomStates(generators_); }  ///< of the same generators

 private:
  std::vector<at::Generator> generators_;
  std::vector<torch::Tensor> states_;
};

}  // namespace maniple
