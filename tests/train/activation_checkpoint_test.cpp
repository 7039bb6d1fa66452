// Activation checkpointing against its definition: the same results and gradients as without, and nothing kept.
#include <memory>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include "train/tensor/torch_compat.h"
#include <maniple/maniple.h>

namespace maniple::harness::activation_checkpoint_test {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

Tensor parameter(torch::IntArrayRef sizes, int seed) { return numbers(sizes, seed).set_requires_grad(true); }

/// Calls the function, with checkpointing or without.
struct Maybe {
  bool on = true;
  template <class Function, class... Arguments>
  auto operator()(Function function, Arguments... arguments) const {
    return on ? checkpoint(function, arguments...) : detail::call_or_forward(function, arguments...);
  }
};

/// A loss of some leaves that uses Maybe somewhere has equal gradients with checkpointing and without. Where a leaf is
/// used more than twice they are added up in another order, and under autocast in another dtype: a tolerance.
void expect_same(const std::function<Tensor(const Maybe&, const Tensors&)>& loss, double tolerance = 0) {
  constexpr int leaves = 3;
  std::vector<Tensors> gradients;
  std::vector<Tensor> losses;
  for (const bool on : {false, true}) {
    Tensors all;
    for (int i = 0; i < leaves; ++i) all.push_back(parameter({4, 4}, 10 + i));
    losses.push_back(loss(Maybe{on}, all));
    losses.back().backward();
    Tensors own;
    for (const Tensor& leaf : all) own.push_back(leaf.grad());
    gradients.push_back(own);
  }
  EXPECT_TRUE(torch::equal(losses[0], losses[1]));
  for (std::size_t i = 0; i < gradients[0].size(); ++i) {
    ASSERT_EQ(gradients[0][i].defined(), gradients[1][i].defined()) << "leaf " << i;
    if (!gradients[0][i].defined()) continue;
    const double difference = (gradients[0][i] - gradients[1][i]).abs().max().item<double>();
    EXPECT_LE(difference, tolerance * gradients[0][i].abs().max().item<double>()) << "leaf " << i;
  }
}

TEST(ActivationCheckpoint, Arguments) {
  expect_same([](const Maybe& maybe, const Tensors& t) {
    return maybe([](const Tensor& a, const Tensor& b) { return torch::tanh(a.matmul(b)); }, t[0], t[1]).sum();
  });
}

TEST(ActivationCheckpoint, ArgumentsWithoutTensorsOrGradients) {
  expect_same([](const Maybe& maybe, const Tensors& t) {
    const auto scaled = [](const Tensor& a, double factor, const Tensor& which, const Tensor& none) {
      EXPECT_FALSE(none.defined());
      return torch::tanh(a * factor).index_select(0, which);
    };
    return maybe(scaled, t[0], 0.5, torch::tensor({1, 3}).to(training_device()), Tensor()).sum();
  });
}

TEST(ActivationCheckpoint, CapturedParametersInsideAndOutside) {
  expect_same([](const Maybe& maybe, const Tensors& t) {
    const Tensor x = t[0] * 2;
    const Tensor y = maybe([t](const Tensor& a) { return torch::sigmoid(a.matmul(t[1])).matmul(t[2]); }, x);
    return (torch::tanh(y) * t[1]).sum();
  });
}

TEST(ActivationCheckpoint, CapturedTensorsWithAGraphOfTheirOwn) {
  expect_same([](const Maybe& maybe, const Tensors& t) {
    const Tensor captured = torch::tanh(t[0]).matmul(t[1]);  // its graph is used by both calls and outside
    const auto f = [captured](const Tensor& a) { return torch::sigmoid(a * captured); };
    return (maybe(f, t[2]) * maybe(f, t[2] * 2) + captured).sum();
  });
}

TEST(ActivationCheckpoint, SeveralResults) {
  expect_same(
      [](const Maybe& maybe, const Tensors& t) {
        const auto [a, b, indices] = maybe(
            [](const Tensor& x, const Tensor& y) {
              const Tensor z = x.matmul(y);
              return std::make_tuple(torch::tanh(z), z.exp(), z.argmax(1));
            },
            t[0], t[1]);
        EXPECT_FALSE(indices.requires_grad());
        const Tensors list = maybe([](const Tensor& x) { return Tensors{x.sin(), x.cos(), x}; }, t[2]);
        const auto pair = maybe([](const Tensor& x) { return std::make_pair(x * 2, x.detach()); }, t[2]);
        EXPECT_FALSE(pair.second.requires_grad());
        return (a * list[1] + list[2] * pair.first).sum();  // b and list[0] are not used
      },
      1e-6);
}

TEST(ActivationCheckpoint, ChangesInPlaceInside) {
  expect_same([](const Maybe& maybe, const Tensors& t) {
    const auto f = [t](const Tensor& a) {
      Tensor y = a.clone();
      y.select(0, 1).mul_(t[1].select(0, 0));  // of a view
      y.add_(t[2]);
      return torch::relu_(y);
    };
    return maybe(f, t[0]).pow(2).sum();
  });
}

TEST(ActivationCheckpoint, Nested) {
  expect_same([](const Maybe& maybe, const Tensors& t) {
    const auto inner = [t](const Tensor& a) { return torch::tanh(a.matmul(t[1])); };
    const auto middle = [maybe, inner, t](const Tensor& a) { return maybe(inner, maybe(inner, a) * t[2]); };
    const auto outer = [maybe, middle](const Tensor& a) { return maybe(middle, a).sigmoid(); };
    return maybe(outer, t[0]).sum();
  });
}

TEST(ActivationCheckpoint, Modules) {
  std::vector<Gradients> gradients;
  for (const bool on : {false, true}) {
    Net net;
    fill(*net, 3);
    const Maybe maybe{on};
    loss_of(maybe(net, maybe(net.ptr(), numbers({4, 8})).repeat({1, 2}))).backward();
    gradients.push_back(gradients_of(*net));
  }
  expect_close(gradients[1], gradients[0], 1e-6);  // a parameter's two gradients are added in another order
}

TEST(ActivationCheckpoint, Sequential) {
  std::vector<Gradients> gradients;
  for (const std::int64_t segments : {0, 1, 2, 3, 5}) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 4));
    fill(*net, 3);
    const Tensor x = numbers({4, 8});
    loss_of(segments == 0 ? net->forward(x) : checkpoint_sequential(net, segments, x)).backward();
    gradients.push_back(gradients_of(*net));
    expect_identical(gradients.back(), gradients.front());
    EXPECT_THROW(checkpoint_sequential(net, 6, x), InvalidArgument);
  }
}

// A hook that doubles a gradient must not run in the inner backward as well.
TEST(ActivationCheckpoint, HooksOfParametersRunOnce) {
  const Tensor weight = parameter({4, 4}, 1), x = parameter({4, 4}, 2);
  int calls = 0;
  weight.register_hook([&calls](const Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const auto f = [weight](const Tensor& a) { return a * weight; };
  (checkpoint(f, x) + checkpoint(f, x)).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(torch::equal(weight.grad(), x.detach() * 4));
}

TEST(ActivationCheckpoint, GradientsOfSomeInputsOnly) {
  const Tensor a = parameter({4, 4}, 1), b = parameter({4, 4}, 2);
  const Tensor y = checkpoint([a](const Tensor& x) { return x * a; }, b * 2).sum();
  const auto gradient = torch::autograd::grad({y}, {b})[0];
  EXPECT_TRUE(torch::equal(gradient, a.detach() * 2));
  EXPECT_FALSE(a.grad().defined());
}

// ---- State of the first call ----------------------------------------------------------------------------------------

TEST(ActivationCheckpoint, TheSameRandomNumbers) {
  const auto run = [](bool on) {
    torch::manual_seed(7);
    Tensor x = torch::ones({64, 64}, training_device()).set_requires_grad(true);
    const auto drop = [](const Tensor& a) { return torch::dropout(a, 0.5, true); };
    const Maybe maybe{on};
    const Tensor y = maybe([maybe, drop](const Tensor& a) { return maybe(drop, maybe(drop, a)); }, x);
    const Tensor between = torch::rand({3});
    y.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), y.detach()));  // x is 1, so both are the mask
    return std::make_tuple(y.detach(), between, torch::rand({3}));
  };
  const auto [y, between, after] = run(true);
  const auto [plain_y, plain_between, plain_after] = run(false);
  EXPECT_TRUE(torch::equal(y, plain_y));
  EXPECT_TRUE(torch::equal(between, plain_between));
  EXPECT_TRUE(torch::equal(after, plain_after));  // backward left the generator as it was
}

TEST(ActivationCheckpoint, TheSameAutocast) {
  const auto device = training_device().type();
  for (const bool inside : {true, false}) {
    std::vector<torch::ScalarType> seen;
    expect_same(
        [&](const Maybe& maybe, const Tensors& t) {
          seen.clear();
          const auto f = [&seen, t](const Tensor& a) {
            const Tensor y = a.matmul(t[1]);
            seen.push_back(y.scalar_type());
            return y.matmul(t[1]).to(torch::kFloat32);
          };
          Tensor y;
          {
            const Autocast autocast(device, {.dtype = torch::kBFloat16, .enabled = inside});
            y = t[0].matmul(t[1]).to(torch::kFloat32);  // its cast of t[1] is cached, and not used inside
            y = maybe(f, y);
            y = y + t[2].matmul(t[1]).to(torch::kFloat32);
          }
          const Autocast other(device, {.dtype = torch::kBFloat16, .enabled = !inside});  // backward's must not matter
          return maybe([](const Tensor& a) { return a; }, y).sum();
        },
        2e-2);
    EXPECT_EQ(seen, std::vector<torch::ScalarType>(2, inside ? torch::kBFloat16 : torch::kFloat32));
  }
  EXPECT_FALSE(autocast_enabled(device));
}

// ---- What is kept ---------------------------------------------------------------------------------------------------

/// Passes a tensor on, and keeps something for backward that can be counted.
struct Counted : torch::autograd::Function<Counted> {
  static inline int alive = 0;
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    ++alive;
    static float one = 1;
    context->save_for_backward({torch::from_blob(&one, {1}, [](void*) { --alive; })});
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list gradients) {
    return gradients;
  }
};

TEST(ActivationCheckpoint, NothingIsKeptBetweenForwardAndBackward) {
  const Tensor x = parameter({4, 4}, 1);
  int most = 0;
  const auto f = [&most](const Tensor& a) {
    const Tensor y = Counted::apply(a);
    most = std::max(most, Counted::alive);
    return y;
  };
  auto token = std::make_shared<int>(0);
  Tensor y = x;
  for (int i = 0; i < 4; ++i) y = checkpoint([f, token](const Tensor& a) { return f(f(a)); }, y);
  EXPECT_EQ(Counted::alive, 0);
  y.sum().backward();
  EXPECT_EQ(Counted::alive, 0);
  EXPECT_EQ(most, 2);               // of one of the four parts
  EXPECT_EQ(token.use_count(), 1);  // the functions are dropped by backward, although y is still there
  Tensor never = checkpoint([token](const Tensor& a) { return a * 2; }, x);
  never = Tensor();
  EXPECT_EQ(token.use_count(), 1);
}

TEST(ActivationCheckpoint, WithoutGradModeItIsJustACall) {
  const Tensor x = parameter({4, 4}, 1);
  int calls = 0;
  const auto f = [&calls](const Tensor& a) {
    ++calls;
    return a * 2;
  };
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(f, x).requires_grad());
  }
  {
    const torch::InferenceMode inference;
    EXPECT_FALSE(checkpoint(f, x).requires_grad());
  }
  EXPECT_FALSE(checkpoint(f, x.detach()).requires_grad());
  EXPECT_EQ(calls, 3);
}

TEST(ActivationCheckpoint, BackwardTwice) {
  const Tensor x = parameter({4, 4}, 1);
  int calls = 0;
  const auto f = [&calls](const Tensor& a) {
    ++calls;
    return a.pow(2);
  };
  const Tensor y = checkpoint(f, x).sum();
  y.backward({}, true);
  y.backward();
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(torch::equal(x.grad(), x.detach() * 4));
  EXPECT_ANY_THROW(y.backward());
  const Tensor z = checkpoint([x] { return x.pow(2); });  // has no input that could be missed
  z.sum().backward();
  EXPECT_ANY_THROW(z.sum().backward());
}

TEST(ActivationCheckpoint, Errors) {
  const Tensor x = parameter({4, 4}, 1), other = parameter({4, 4}, 2);
  const auto error_of = [&](const auto& f) {
    int calls = 0;
    const Tensor y = checkpoint([f, &calls](const Tensor& a) { return f(a, ++calls); }, x * 1).sum();
    return catch_error([&] { y.backward(); });
  };
  const auto expect_text = [](const Caught& caught, const char* text) {
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    EXPECT_NE(caught.text.find(text), std::string::npos) << caught;
  };
  expect_text(error_of([&](const Tensor& a, int call) { return call == 1 ? a * 2 : a * other; }),
              "that it did not use");
  expect_text(error_of([](const Tensor& a, int call) { return call == 1 ? a * 2 : a.narrow(0, 0, 2); }),
              "had shape [2, 4] when it was computed again in backward; in forward it had shape [4, 4]");
  expect_text(error_of([](const Tensor& a, int call) { return call == 1 ? a * 2 : a.detach(); }),
              "required no gradient");

  const auto fails = [](const Tensor& a, int call) {
    if (call == 2) throw std::runtime_error("failed on purpose");
    return a * 2;
  };
  torch::manual_seed(1);
  const Tensor before = torch::rand({1});
  torch::manual_seed(1);
  EXPECT_THROW(error_of(fails), std::runtime_error);
  EXPECT_TRUE(torch::equal(torch::rand({1}), before));
  EXPECT_TRUE(torch::GradMode::is_enabled());

  const Tensor y = checkpoint([](const Tensor& a) { return a.pow(2); }, x).sum();
  expect_text(catch_error([&] { torch::autograd::grad({y}, {x}, {}, true, true); }), "create_graph");

  Tensor changed = x * 1;
  const Tensor z = checkpoint([](const Tensor& a) { return a.pow(2); }, changed).sum();
  changed.add_(1);
  EXPECT_ANY_THROW(z.backward());
}

// ---- With DistributedDataParallel -----------------------------------------------------------------------------------

struct Blocks : torch::nn::Module {
  Blocks() {
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(8, 8)));
    }
    unused = register_module("unused", torch::nn::Linear(8, 8));
  }
  Tensor forward(Tensor x) {
    const auto run = [this](int i) {
      return [this, i](const Tensor& a) { return torch::tanh(blocks[static_cast<std::size_t>(i)]->forward(a)); };
    };
    const Maybe maybe{checkpointed};
    x = maybe(run(0), x);
    x = maybe([maybe, run](const Tensor& a) { return maybe(run(2), maybe(run(1), a)); }, x);
    x = maybe(run(3), x) + maybe(run(0), x);  // of two parts, and first and last
    return use_unused ? x + unused->forward(x) : x;
  }
  std::vector<torch::nn::Linear> blocks;
  torch::nn::Linear unused{nullptr};
  bool checkpointed = false, use_unused = true;
};

TEST(ActivationCheckpoint, GradientsOfDataParallelTraining) {
  const std::vector<DdpOptions> settings = {
      {},
      {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .overlap = Overlap::inline_},
      {.bucket_cap_mb = kTiny, .find_unused_parameters = true, .overlap = Overlap::thread},
      {.bucket_cap_mb = kTiny, .static_graph = true, .gradient_as_bucket_view = false},
  };
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [&](Rank& r) {
      for (const DdpOptions& setting : settings) {
        const Tensor batch = numbers({12, 8});
        auto whole = std::make_shared<Blocks>(), net = std::make_shared<Blocks>();
        fill(*whole, 3);
        fill(*net, 3);
        net->checkpointed = true;
        whole->use_unused = net->use_unused = !setting.find_unused_parameters && !setting.static_graph;
        DdpOptions options = setting;
        options.group = r.world;
        DistributedDataParallel<Blocks> ddp(net, options);
        torch::optim::SGD whole_optimizer(whole->parameters(), 0.1), optimizer(net->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          whole_optimizer.zero_grad();
          optimizer.zero_grad();
          loss_of(whole->forward(batch)).backward();
          loss_of(ddp(shard(batch, r.rank, r.size))).backward();
          expect_close(gradients_of(*net), gradients_of(*whole), 5e-6);
          expect_same_everywhere(r, *net);
          whole_optimizer.step();
          optimizer.step();
        }
      }
    });
  }
}

TEST(ActivationCheckpoint, AnArgumentThatWasChangedIsNoticed) {
  const Tensor weight = torch::full({3}, 2.0, torch::requires_grad());
  const Tensor pixels = torch::full({3}, 255.0);
  const Tensor result = maniple::checkpoint([&](Tensor x) { return x.div_(255) * weight; }, pixels);
  EXPECT_THROW(result.sum().backward(), c10::Error);
}

}  // namespace
}  // namespace maniple::harness::activation_checkpoint_test
