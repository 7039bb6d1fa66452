// A model of fully sharded units, and the comparison with one process that computes the batches of all ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "harness/run_ranks.h"
#include "train/fully_sharded/unit.h"
#include "train/models.h"
#include <maniple/maniple.h>

namespace maniple::harness::sharded_models {

namespace nn = torch::nn;
using maniple::testing_models::numbers;
using maniple::testing_models::training_device;
using torch::Tensor;

/// Values that depend on names alone.
template <class Module>
Module filled(Module module) {
  const torch::NoGradGuard no_grad;
  int seed = 1;
  for (const auto& item : module->named_parameters())
    item.value().copy_(numbers({item.value().numel()}, seed++).view(item.value().sizes()) * 0.5);
  module->to(training_device());
  return module;
}

/// Four rows: of three ranks, the last has none. A rank may use none of its parameters.
enum class Uses { first, both, none };
struct LayerImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    if (uses == Uses::none) return x * 2;
    return uses == Uses::both ? other(first(x)) : first(x);
  }
  nn::Linear first = register_module("first", nn::Linear(4, 4)), other = register_module("other", nn::Linear(4, 4));
  Uses uses = Uses::first;
};
TORCH_MODULE(Layer);
inline Layer layer() { return filled(Layer()); }
using Unit = FullyShardedImpl<LayerImpl>;

using Wrap = std::function<void(nn::Sequential&)>;

/// A layer of the root's own on each side of three units, of which a call may leave out some.
struct NetImpl : nn::Module {
  explicit NetImpl(const Wrap& add) {
    for (int i = 0; i < 3; ++i) add(blocks);
    filled(first), filled(last);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = first(x);
    for (std::size_t i = 0; i < 3; ++i) {
      if (i != left_out) y = torch::tanh(call(i, y));
    }
    return last(y);
  }
  Tensor call(std::size_t i, const Tensor& x) {
    if (auto unit = std::dynamic_pointer_cast<Unit>(blocks->ptr(i))) return unit->forward(x);
    return blocks->ptr<LayerImpl>(i)->forward(x);
  }
  nn::Linear first = register_module("first", nn::Linear(4, 4)), last = register_module("last", nn::Linear(4, 3));
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  std::size_t left_out = 3;
};
TORCH_MODULE(Net);

inline Net plain() {
  return Net([](nn::Sequential& to) { to->push_back(layer()); });
}
inline FullySharded<Net> sharded(const FullyShardOptions& options) {
  return fully_shard([&] { return Net([&](nn::Sequential& to) { to->push_back(fully_shard(layer, options)); }); },
                     options);
}

inline Tensor batch(int step, int rank) { return numbers({6, 4}, 10 * step + rank).to(training_device()); }
inline Tensor loss_of(const Tensor& y) { return (y - 0.3).pow(2).mean(); }

/// The mean over the ranks of their losses, in one process.
inline Tensor loss_of_all(const std::function<Tensor(int)>& loss, int ranks) {
  Tensor sum = loss(0);
  for (int rank = 1; rank < ranks; ++rank) sum = sum + loss(rank);
  return sum / ranks;
}

inline void expect_close(const Tensor& a, const Tensor& b, const std::string& what, double tolerance = 1e-5) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_TRUE(torch::allclose(a, b, tolerance, tolerance)) << what << "\n" << a << "\n" << b;
}

inline void expect_same(nn::Module& ours, const nn::Module& reference) {
  const auto named = reference.named_parameters();
  for (const auto& [name, whole] : full_parameters(ours)) expect_close(whole, named[name].detach(), name);
}

/// A gradient that one of the two has not is zero in the other: LibTorch's zero_grad leaves zeros in one process.
inline void expect_same_gradients(nn::Module& ours, const nn::Module& reference, const ProcessGroup& group) {
  const auto named = reference.named_parameters();
  for (const auto& item : ours.named_parameters()) {
    const Tensor& like = named[item.key()];
    const Tensor whole = like.grad().defined() ? like.grad() : torch::zeros_like(like);
    const auto own = rows_of(whole.size(0), group.size(), group.rank());
    const Tensor& gradient = item.value().grad();
    expect_close(gradient.defined() ? gradient : torch::zeros_like(item.value()),
                 whole.narrow(0, own.begin, own.count).detach(), item.key());
  }
}

inline void for_all(const std::function<void(Rank&, Overlap)>& use) {
  for (const int n : {2, 3}) {
    for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
      run_ranks({.n = n}, [&](Rank& r) { use(r, overlap); });
    }
  }
}

/// The module of a unit, to change its settings.
template <class Unit>
auto& inside(Unit& unit) {
  const auto module = unit->module();
  using Module = std::remove_const_t<std::remove_reference_t<decltype(*module)>>;
  return const_cast<Module&>(*module);
}

}  // namespace maniple::harness::sharded_models
