// Activation checkpointing: a part of forward keeps only its inputs and is computed again in backward. It saves memory
// for about a third more compute time. (checkpoint.h saves training runs to disk.)
//
//   torch::Tensor forward(torch::Tensor x) {
//     // a module: calls its forward
//     for (auto& block : blocks) x = maniple::checkpoint(block, x);
//     auto [y, state] = maniple::checkpoint([this](const torch::Tensor& a) { return lstm(a); }, x);  // or any function
//     return y;
//   }
//
// Function            A module (a TORCH_MODULE holder or std::shared_ptr) or any copyable function. It is called twice,
//                     so objects captured by reference must live until backward, and both calls must compute the same.
// Arguments, results  Tensor arguments are kept for backward, other arguments are copied. The function returns a
//                     tensor, or a std::vector, std::pair or std::tuple of tensors.
// Gradients           Equal to those without checkpointing, for arguments, for all parameters in use, and for other
//                     captured tensors. They are found in the graph of the first call, so no list of parameters is
//                     needed.
// Randomness          The second call restores the state of the random generators (of the CPU, and of the arguments'
//                     GPUs) from the first, so dropout drops the same elements.
// Autocast            The second call uses the setting and dtype of the first. Casts of weights are not cached inside.
// With DDP            Gradients flow through the graph made by forward, so the hook of each parameter runs once per
//                     backward, at its usual time. Buckets, overlap, find_unused_parameters and static_graph work as
//                     usual, and no parameter must be delayed.
// Nesting             A checkpointed function may call checkpoint.
// Side effects        Happen twice: batch norm updates its running statistics twice, as in PyTorch. (The statistics of
//                     the first call enter twice; half the momentum compensates for it.)
//
// Without grad mode, or if nothing requires a gradient, the function is simply called. A second backward with
// retain_graph computes the function again; without retain_graph LibTorch throws, as it does for an argument changed in
// place since forward. backward with create_graph is rejected.
//
// Cost. Between forward and backward a part keeps only its inputs; while it runs, in forward and in backward, it needs
// as much memory as without checkpointing. Thus n parts of equal size keep n inputs and the activations of one part.
// About sqrt(number of layers) parts use the least memory.
#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct ActivationCheckpointOptions {
  /// Off: for functions without random numbers; saves some microseconds per call. Must be off during CUDA graph
  /// capture.
  bool preserve_random_state = true;
};

namespace detail {

using TensorFunction = std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>;

/// checkpoint() for lists of tensors.
std::vector<torch::Tensor> checkpoint_tensors(TensorFunction function, const std::vector<torch::Tensor>& inputs,
                                              const ActivationCheckpointOptions& options);

/// Converts the result of a checkpointed function to a list of tensors and back.
template <class Result>
struct TensorResult {
  static_assert(sizeof(Result) == 0,
                "a checkpointed function returns a tensor, or a std::vector, std::pair or std::tuple of tensors");
};
template <>
struct TensorResult<torch::Tensor> {
  static std::vector<torch::Tensor> list(torch::Tensor result) { return {std::move(result)}; }
  static torch::Tensor from(std::vector<torch::Tensor> list) { return std::move(list.front()); }
};
template <>
struct TensorResult<std::vector<torch::Tensor>> {
  static std::vector<torch::Tensor> list(std::vector<torch::Tensor> result) { return result; }
  static std::vector<torch::Tensor> from(std::vector<torch::Tensor> list) { return list; }
};
template <class Tuple>
struct TensorTuple {
  static std::vector<torch::Tensor> list(const Tuple& result) {
    return std::apply([](const auto&... one) { return std::vector<torch::Tensor>{one...}; }, result);
  }
  static Tuple from(const std::vector<torch::Tensor>& list) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      return Tuple{list[i]...};
    }(std::make_index_sequence<std::tuple_size_v<Tuple>>());
  }
};
template <class... Tensors>
struct TensorResult<std::tuple<Tensors...>> : TensorTuple<std::tuple<Tensors...>> {};
template <>
struct TensorResult<std::pair<torch::Tensor, torch::Tensor>> : TensorTuple<std::pair<torch::Tensor, torch::Tensor>> {};

/// Calls a function, or the forward of a module behind a pointer.
template <class Function, class... Arguments>
decltype(auto) call_or_forward(Function& function, Arguments&... arguments) {
  if constexpr (std::is_invocable_v<Function&, Arguments&...>) {
    return function(arguments...);
  } else {
    return function->forward(arguments...);
  }
}

}  // namespace detail

/// See above. If the function behaves differently in the second call, backward throws InvalidArgument.
template <class Function, class... Arguments>
auto checkpoint(const ActivationCheckpointOptions& options, Function function, Arguments... arguments) {
  using Result = std::decay_t<decltype(detail::call_or_forward(function, arguments...))>;
  std::vector<torch::Tensor> inputs;
  // checkpoint_tensors keeps the tensors; their places in `kept` stay empty.
  [[maybe_unused]] const auto take = [&inputs](auto& argument) {
    if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, torch::Tensor>) {
      inputs.push_back(std::exchange(argument, torch::Tensor()));
    }
  };
  (take(arguments), ...);
  auto call = [function = std::move(function),
               kept = std::make_tuple(std::move(arguments)...)](const std::vector<torch::Tensor>& given) mutable {
    auto all = kept;
    [[maybe_unused]] std::size_t next = 0;
    [[maybe_unused]] const auto put = [&](auto& argument) {
      if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, torch::Tensor>) argument = given[next++];
    };
    return std::apply(
        [&](auto&... one) {
          (put(one), ...);
          return detail::TensorResult<Result>::list(detail::call_or_forward(function, one...));
        },
        all);
  };
  return detail::TensorResult<Result>::from(detail::checkpoint_tensors(std::move(call), inputs, options));
}

template <class Function, class... Arguments>
  requires(!std::is_same_v<std::decay_t<Function>, ActivationCheckpointOptions>)
auto checkpoint(Function function, Arguments... arguments) {
  return checkpoint(ActivationCheckpointOptions{}, std::move(function), std::move(arguments)...);
}

/// Runs the modules in `segments` parts with equal numbers of modules. All parts but the last are checkpointed;
/// backward needs the last one's activations first. Throws InvalidArgument if there are fewer modules than segments.
torch::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, std::int64_t segments, torch::Tensor input,
                                    const ActivationCheckpointOptions& options = {});

}  // namespace maniple
