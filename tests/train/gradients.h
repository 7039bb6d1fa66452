// Comparing gradients: with a reference, and between ranks.
#pragma once

#include <gtest/gtest.h>

#include "harness/rank.h"
#include "train/models.h"
#include <maniple/dist.h>

namespace maniple::harness {

using namespace maniple::testing_models;

inline constexpr double kTiny = 1e-5;  // MiB: every parameter is a bucket of its own

inline double tolerance(torch::ScalarType dtype) {
  return dtype == torch::kFloat64 ? 1e-12 : dtype == torch::kBFloat16 ? 3e-2 : 2e-6;
}

inline void expect_close(const Gradients& actual, const Gradients& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, gradient] : expected) {
    const torch::Tensor& own = actual.at(name);
    ASSERT_EQ(own.defined(), gradient.defined()) << name;
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const double error =
        (own.cpu().to(torch::kFloat64) - gradient.cpu().to(torch::kFloat64)).abs().max().item<double>();
    EXPECT_LE(error, tolerance * std::max(1.0, gradient.abs().max().item<double>())) << name;
  }
}

inline void expect_identical(const Gradients& actual, const Gradients& expected) {
  for (const auto& [name, gradient] : expected) EXPECT_TRUE(torch::equal(actual.at(name), gradient)) << name;
}

/// All ranks hold the same bits.
inline void expect_same_everywhere(Rank& r, const torch::nn::Module& module, bool gradients = true) {
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor own = gradients ? item.value().grad() : item.value().detach();
    if (!own.defined()) continue;
    torch::Tensor root = own.clone();
    broadcast(root, 0, {.group = r.world});
    EXPECT_TRUE(torch::equal(own, root)) << item.key() << " differs from rank 0's";
  }
}

}  // namespace maniple::harness
