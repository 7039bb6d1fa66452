// Parameters with prescribed gradients, for tests of optimizers on several ranks.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/base/format.h"
#include "train/gradients.h"

namespace maniple::harness {

using torch::Tensor;
using Parameters = std::vector<Tensor>;

inline Tensor leaf(const Tensor& values) { return values.detach().requires_grad_(); }

inline Parameters copies_of(const Parameters& parameters) {
  Parameters result;
  for (const Tensor& one : parameters) result.push_back(one.detach().clone().set_requires_grad(one.requires_grad()));
  return result;
}

/// In odd steps some have none; some are not laid out as their parameter.
inline void set_gradients(const Parameters& parameters, int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& parameter = parameters[i];
    const bool none = !parameter.requires_grad() || (step % 2 == 1 && i % 3 == 1);
    Tensor gradient;
    if (!none) {
      gradient = numbers(parameter.sizes(), step * 100 + static_cast<int>(i)).to(parameter.scalar_type());
      if (parameter.dim() == 2 && i % 2 == 0) gradient = gradient.t().contiguous().t();
    }
    parameter.mutable_grad() = gradient;
  }
}

inline void expect_equal(const Parameters& actual, const Parameters& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(actual[i].detach(), expected[i].detach())) << what << ", parameter " << i;
}

}  // namespace maniple::harness
