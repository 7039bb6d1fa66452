// What a computation changes for a while is as it was at the end of the scope.
#include "train/restored.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include <torch/torch.h>

namespace maniple::restored_test {
namespace {

using torch::Tensor;

/// Batch norm, a weight under two names, and an undefined buffer.
struct ModelImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return norm->forward(torch::linear(torch::linear(x, first), second)); }
  Tensor first = register_parameter("first", torch::eye(4) * 2);
  Tensor second = register_parameter("second", first);
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
  Tensor none = register_buffer("none", Tensor());
};
TORCH_MODULE(Model);

std::vector<Tensor> tensors_of(const Model& model) {
  std::vector<Tensor> all = model->parameters();
  for (const Tensor& buffer : model->buffers()) all.push_back(buffer);
  return all;
}

struct Facts {
  explicit Facts(const Tensor& tensor)
      : object(tensor),
        memory(tensor.defined() ? tensor.data_ptr() : nullptr),
        values(tensor.defined() ? tensor.detach().clone() : tensor) {}
  void expect_unchanged() const {
    ASSERT_EQ(object.defined(), values.defined());
    if (!object.defined()) return;
    EXPECT_EQ(object.data_ptr(), memory);
    EXPECT_TRUE(torch::equal(object, values));
    EXPECT_EQ(object.scalar_type(), values.scalar_type());
    EXPECT_EQ(object.requires_grad(), requires_grad);
  }
  Tensor object;
  const void* memory;
  Tensor values;
  bool requires_grad = object.defined() && object.requires_grad();
};

std::vector<Facts> facts_of(const std::vector<Tensor>& tensors) { return {tensors.begin(), tensors.end()}; }

TEST(Restored, ValuesAreWrittenBackAlsoAfterAnException) {
  for (const bool throws : {false, true}) {
    Model model;
    const Tensor view = model->norm->running_mean.slice(0, 1, 3);
    const std::vector<Facts> facts = facts_of(tensors_of(model));
    try {
      const Restored values{TensorValues(tensors_of(model))};
      model->forward(torch::rand({3, 4})).sum().backward();
      const torch::NoGradGuard no_grad;
      model->first.mul_(3);
      EXPECT_FALSE(torch::equal(model->norm->running_mean, torch::zeros({4})));
      if (throws) throw std::runtime_error("forward failed");
    } catch (const std::runtime_error&) {
      EXPECT_TRUE(throws);
    }
    for (const Facts& one : facts) one.expect_unchanged();
    EXPECT_TRUE(torch::equal(view, torch::zeros({2})));
    EXPECT_TRUE(model->first.grad().defined()) << "gradients are not part of the values";
    EXPECT_TRUE(model->second.is_same(model->first));
  }
}

TEST(Restored, RestoredValuesInvalidateGraphsThatSavedTheTensor) {
  const Tensor x = torch::ones({2}).set_requires_grad(true);
  const Tensor buffer = torch::full({2}, 3.0F);
  const Tensor before = (x * buffer).sum();
  {
    const Restored values{TensorValues({buffer})};
  }
  EXPECT_THROW(before.backward(), c10::Error);
}

TEST(Restored, ScopesAreNested) {
  const Tensor tensor = torch::zeros({3});
  {
    const Restored outer{TensorValues({tensor})};
    tensor.add_(1);
    {
      const Restored inner{TensorValues({tensor, tensor})};
      tensor.add_(5);
    }
    EXPECT_TRUE(torch::equal(tensor, torch::ones({3})));
  }
  EXPECT_TRUE(torch::equal(tensor, torch::zeros({3})));
}

TEST(Restored, RandomNumbersGoOnAsIfNoneHadBeenDrawn) {
  torch::manual_seed(5);
  const RandomStates begin({at::globalContext().defaultGenerator(torch::kCPU)});
  const Tensor expected = torch::rand({4});
  torch::manual_seed(5);
  {
    const Restored random{begin.now()};
    torch::rand({9});
  }
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
  begin.restore();
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST(Restored, AFailedRestoreIsThrownUnlessAnotherExceptionEndsTheScope) {
  struct Fails {
    void restore() const { throw std::logic_error("not restored"); }
  };
  EXPECT_THROW({ const Restored fails{Fails()}; }, std::logic_error);
  const auto both = [] {
    const Restored fails{Fails()};
    throw std::runtime_error("the first");
  };
  EXPECT_THROW(both(), std::runtime_error);
}

}  // namespace
}  // namespace maniple::restored_test
