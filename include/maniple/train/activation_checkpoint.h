// Activation checkpointing: a part of the forward keeps its inputs only, and is computed again in backward. Less
// memory, for about a third more time. (What saves a training run to disk is in checkpoint.h.)
//
//   torch::Tensor forward(torch::Tensor x) {
//     // a module: calls its forward
//     for (auto& block : blocks) x = maniple::checkpoint(block, x);
//     auto [y, state] = maniple::checkpoint([this](const torch::Tensor& a) { return lstm(a); }, x);  // or any function
//     return y;
//   }
//
// What is called      a module (a TORCH_MODULE holder or std::shared_ptr) or any function that can be copied. It is
//                     called twice, so what it captures by reference must live until backward, and it must do the same
//                     both times.
// Arguments, results  Tensors are kept for backward, other arguments are copied. It returns a tensor, a std::vector,
// std::pair or
//                     std::tuple of tensors.
// Gradients           are those of the function without checkpointing, for its arguments, for every parameter that it
//                     uses and for whatever else it captures: all of it is found in the graph of the first call. No
//                     list of parameters is needed.
// Randomness          The state of the random generators (the CPU's and those of the arguments' GPUs) is that of the
//                     first call, so dropout drops the same elements.
// Autocast            is on or off, and of the dtype, as in the first call. Casts of weights are not cached inside.
// With DDP            Gradients leave through the graph that forward made, so each parameter's hook runs once in a
//                     backward, in its place: buckets, overlap, find_unused_parameters and static_graph work as ever.
//                     Nothing has to be delayed.
// Nests               A function that is checkpointed may use checkpoint itself.
// Side effects        happen twice: running statistics of batch norm are updated twice, as in PyTorch. (Those of the
//                     first call are in both; a momentum that is half as large makes up for it.)
//
// Without grad mode, or if nothing requires a gradient, the function is just called. backward twice with retain_graph
// computes twice; without it the second is LibTorch's error. backward with create_graph is refused. An argument that
// was changed in place since is LibTorch's error as well.
//
// What it costs. A part holds nothing but its inputs between forward and its backward; while it is computed, in forward
// and in backward, it holds all that it holds without checkpointing. So n parts of equal size keep n inputs and the
// activations of one part: about sqrt(number of layers) parts use the least memory.
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
  /// Off: for functions without random numbers; saves some microseconds a call. Needed while a CUDA graph is captured.
  bool preserve_random_state = true;
};

namespace detail {

using TensorFunction = std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>;

/// What checkpoint does, for lists of tensors.
std::vector<torch::Tensor> checkpoint_tensors(TensorFunction function, const std::vector<torch::Tensor>& inputs,
                                              const ActivationCheckpointOptions& options);

/// What a checkpointed function returns, as a list of tensors and back.
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

/// A function, or the forward of a module behind a pointer.
template <class Function, class... Arguments>
decltype(auto) call_or_forward(Function& function, Arguments&... arguments) {
  if constexpr (std::is_invocable_v<Function&, Arguments&...>) {
    return function(arguments...);
  } else {
    return function->forward(arguments...);
  }
}

}  // namespace detail

/// See above. Throws, in backward, InvalidArgument if the function did something else the second time.
template <class Function, class... Arguments>
auto checkpoint(const ActivationCheckpointOptions& options, Function function, Arguments... arguments) {
  using Result = std::decay_t<decltype(detail::call_or_forward(function, arguments...))>;
  std::vector<torch::Tensor> inputs;
  // Tensors are kept by checkpoint_tensors; in `kept` they leave their places.
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

/// Runs a sequence of modules in `segments` parts of equally many modules; all but the last are checkpointed (its
/// activations are needed first). Throws InvalidArgument unless there are at least as many modules as segments.
torch::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, std::int64_t segments, torch::Tensor input,
                                    const ActivationCheckpointOptions& options = {});

}  // namespace maniple
