// The optimizer's step as a part of backward, and gradients whose average is delayed.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_step_test {
namespace {

using MakeOptimizer = std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

const std::map<std::string, MakeOptimizer>& optimizers() {
  static const std::map<std::string, MakeOptimizer> all = {
      {"SGD",
       [](auto parameters) {
         return std::make_shared<torch::optim::SGD>(parameters,
                                                    torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam", [](auto parameters) { return std::make_shared<torch::optim::Adam>(parameters, 0.01); }},
      {"AdamW", [](auto parameters) { return std::make_shared<torch::optim::AdamW>(parameters, 0.01); }},
      {"Adagrad", [](auto parameters) { return std::make_shared<torch::optim::Adagrad>(parameters, 0.01); }},
      {"RMSprop", [](auto parameters) { return std::make_shared<torch::optim::RMSprop>(parameters, 0.01); }}};
  return all;
}

OptimizerFactory for_each_parameter(const MakeOptimizer& make) {
  return [make](const std::string&, const torch::Tensor& parameter) { return make({parameter}); };
}

/// The parameters after some steps, each of which adds up two batches; the step in backward or after it.
std::vector<torch::Tensor> trained(Rank& r, const MakeOptimizer& make, bool in_backward, DdpOptions options,
                                   const char* hook = nullptr) {
  auto net = std::make_shared<NetImpl>(16, true);
  fill(*net, 3);
  options.group = r.world;
  DistributedDataParallel<NetImpl> ddp(net, options);
  if (hook != nullptr) ddp.register_comm_hook(comm_hook_named(hook));
  std::shared_ptr<torch::optim::Optimizer> after;
  if (in_backward) {
    ddp.apply_optimizer_in_backward(for_each_parameter(make));
    EXPECT_EQ(ddp.optimizers().size(), net->parameters().size());
  } else {
    after = make(net->parameters());
    EXPECT_TRUE(ddp.optimizers().empty());
  }
  for (int step = 0; step < 5; ++step) {
    if (step == 3) {  // a schedule
      for (const auto& one : ddp.optimizers()) one->param_groups()[0].options().set_lr(0.003);
      if (after) after->param_groups()[0].options().set_lr(0.003);
    }
    net->zero_grad(step % 2 == 1);
    {
      const auto guard = ddp.no_sync();
      const torch::Tensor before = net->fc2->weight.detach().clone();
      loss_of(ddp->forward(numbers({4, 8}, 10 * step + r.rank))).backward();
      EXPECT_TRUE(torch::equal(before, net->fc2->weight)) << "stepped under no_sync";
    }
    loss_of(ddp->forward(numbers({4, 8}, 100 + 10 * step + r.rank))).backward();
    if (after) after->step();
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  return result;
}

TEST(DdpStep, InBackwardGivesTheBitsOfAStepAfterIt) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks({.n = n}, [n](Rank& r) {
      for (const auto& [name, make] : optimizers()) {
        const auto expected = trained(r, make, false, {});
        const auto expect_bits = [&, &name = name](const std::vector<torch::Tensor>& actual) {
          ASSERT_EQ(actual.size(), expected.size());
          for (std::size_t i = 0; i < expected.size(); ++i)
            EXPECT_TRUE(torch::equal(actual[i], expected[i])) << name << i;
        };
        const DdpOptions many{.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny};
        for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
          DdpOptions options = many;
          options.overlap = overlap;
          expect_bits(trained(r, make, true, options));
          if (n != 2) continue;
          options.gradient_as_bucket_view = false;
          expect_bits(trained(r, make, true, options));
          options.find_unused_parameters = true;
          expect_bits(trained(r, make, true, options));
          options.find_unused_parameters = false;
          options.static_graph = true;
          expect_bits(trained(r, make, true, options, "all_reduce"));
        }
      }
    });
  }
}

// With buckets averaged in backward, the second layer has taken its step before the first has a gradient.
TEST(DdpStep, IsTakenWhileBackwardGoesOn) {
  for (const bool early : {true, false}) {
    run_ranks({.n = 2}, [early](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = kTiny,
                                                 .first_bucket_mb = kTiny,
                                                 .group = r.world,
                                                 .overlap = early ? Overlap::inline_ : Overlap::none});
      ddp.apply_optimizer_in_backward(for_each_parameter(optimizers().at("SGD")));
      bool stepped = false;
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        const torch::Tensor hidden = net->fc1->forward(numbers({4, 8}, r.rank));
        const torch::Tensor before = net->fc2->weight.detach().clone();
        hidden.register_hook([&](const torch::Tensor&) { stepped = !torch::equal(before, net->fc2->weight); });
        loss_of(net->fc2->forward(hidden)).backward();
        EXPECT_FALSE(torch::equal(before, net->fc2->weight));
      }
      // On a GPU the step follows when the average is there, which may be later than the host gets here.
      EXPECT_TRUE(training_device().is_cpu() ? stepped == early : early || !stepped) << stepped;
    });
  }
}

// A part of the graph that still needs a parameter is not given the new one silently.
TEST(DdpStep, AParameterThatIsNeededLaterIsAnError) {
  run_ranks({.n = 1}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(
        net, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .group = r.world, .overlap = Overlap::inline_});
    ddp.apply_optimizer_in_backward(for_each_parameter(optimizers().at("SGD")));
    loss_of(ddp->forward(numbers({4, 8}))).backward();
    const torch::Tensor weight = net->fc2->weight.detach();  // shares its memory
    const torch::Tensor hidden = net->fc1->forward(numbers({4, 8})).mm(weight.t()).mm(weight);
    EXPECT_THROW(loss_of(net->fc2->forward(hidden)).backward(), c10::Error);
  });
}

TEST(DdpStep, ABackwardThatFailsHalfWayLeavesASoundWrapper) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    run_ranks({.n = 2}, [overlap](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      fill(*net, 3);
      DistributedDataParallel<NetImpl> ddp(
          net, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .group = r.world, .overlap = overlap});
      ddp.apply_optimizer_in_backward(for_each_parameter(optimizers().at("Adam")));
      for (int step = 0; step < 8; ++step) {
        net->zero_grad();
        const bool fails = step % 2 == 1;
        const torch::Tensor hidden = ThrowInBackward::apply(net->fc1->forward(numbers({4, 8}, r.rank)), fails);
        const torch::Tensor loss = loss_of(net->fc2->forward(hidden));
        if (fails) {
          EXPECT_THROW(loss.backward(), std::runtime_error);
        } else if (step == 0 || overlap == Overlap::none) {
          EXPECT_NO_THROW(loss.backward());
          expect_same_everywhere(r, *net);                           // the gradients
          r.phase("step " + std::to_string(step) + " is compared");  // what fails next aborts the group
        } else {
          // It had communicated, and may have stepped one rank and not the other.
          const Caught caught = catch_error([&] { loss.backward(); });
          EXPECT_TRUE(caught.is(ErrorKind::aborted) && contains(caught.text, "backward failed on rank")) << caught;
          break;
        }
      }
    });
  }
}

TEST(DdpStep, InvalidUseThrows) {
  run_ranks({.n = 1}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    const auto expect_error = [&](const OptimizerFactory& make, const char* text) {
      const Caught caught = catch_error([&] { ddp.apply_optimizer_in_backward(make); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, text)) << caught;
    };
    const auto sgd = [](std::vector<torch::Tensor> parameters) {
      return std::make_shared<torch::optim::SGD>(std::move(parameters), 0.1);
    };
    expect_error(nullptr, "needs a function");
    expect_error([](auto&, auto&) { return nullptr; }, "fc1.weight");
    expect_error([&](auto&, auto&) { return sgd(net->parameters()); }, "that parameter and no other");
    expect_error([&](auto&, auto&) { return sgd({net->fc2->bias}); }, "that parameter and no other");
    expect_error(
        [](auto&, auto& parameter) {
          return std::make_shared<torch::optim::LBFGS>(std::vector<torch::Tensor>{parameter});
        },
        "LBFGS");
    EXPECT_TRUE(ddp.optimizers().empty());
    ddp.apply_optimizer_in_backward(for_each_parameter(sgd));
    expect_error(for_each_parameter(sgd), "already");
    loss_of(ddp->forward(numbers({4, 8}))).backward();
    expect_error(for_each_parameter(sgd), "before the first backward");
  });
}

// ---- delay_all_reduce_named_params ---------------------------------------------------------------------------------

TEST(DdpDelay, DelayedGradientsAreAveragedLast) {
  for (const int n : {1, 2, 3, 4}) {
    for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
      for (const std::string trigger : {"", "fc1.weight", "fc2.bias"}) {
        run_ranks({.n = n}, [&](Rank& r) {
          auto whole = std::make_shared<NetImpl>(), net = std::make_shared<NetImpl>();
          fill(*whole, 3);
          fill(*net, 3);
          DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = kTiny,
                                                     .first_bucket_mb = kTiny,
                                                     .gradient_as_bucket_view = n != 3,
                                                     .group = r.world,
                                                     .overlap = overlap,
                                                     .delay_all_reduce_named_params = {"fc2.weight", "fc1.bias"},
                                                     .param_to_hook_all_reduce = trigger});
          const torch::Tensor batch = numbers({12, 8});
          for (int step = 0; step < 4; ++step) {
            whole->zero_grad();
            net->zero_grad(step % 2 == 1);
            loss_of(whole->forward(batch)).backward();
            loss_of(ddp->forward(shard(batch, r.rank, r.size))).backward();
            expect_close(gradients_of(*net), gradients_of(*whole), 2e-6);
            expect_same_everywhere(r, *net);
          }
          const auto buckets = ddp.statistics().buckets;
          ASSERT_EQ(buckets.size(), 4u);
          EXPECT_EQ(buckets[2].parameters, std::vector<std::string>{"fc2.weight"});
          EXPECT_EQ(buckets[3].parameters, std::vector<std::string>{"fc1.bias"});
        });
      }
    }
  }
}

/// x times the weight, computed again in backward by a backward of its own, as activation checkpointing does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor* weight) {
    context->save_for_backward({x});
    context->saved_data["weight"] = *weight;
    return torch::tanh(x.mm(*weight));
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    const torch::AutoGradMode with_grad(true);
    const torch::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::Tensor output = torch::tanh(x.mm(context->saved_data["weight"].toTensor()));
    torch::autograd::backward({output}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

struct Checkpointed : torch::nn::Module {
  Checkpointed() {
    shared = register_parameter("shared", numbers({8, 8}, 4) * 0.3);
    middle = register_parameter("middle", numbers({8, 8}, 5) * 0.3);
    first = register_parameter("first", numbers({8, 8}, 6) * 0.3);
  }
  torch::Tensor forward(const torch::Tensor& x, bool again) {
    const auto times_shared = [&](const torch::Tensor& y) {
      return again ? Recomputed::apply(y, &shared) : torch::tanh(y.mm(shared));
    };
    return times_shared(times_shared(x.mm(first)).mm(middle));
  }
  torch::Tensor shared, middle, first;
};

TEST(DdpDelay, AGradientMayBeComputedInPieces) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    run_ranks({.n = 2}, [overlap](Rank& r) {
      auto whole = std::make_shared<Checkpointed>(), net = std::make_shared<Checkpointed>();
      DistributedDataParallel<Checkpointed> ddp(net, {.bucket_cap_mb = kTiny,
                                                      .first_bucket_mb = kTiny,
                                                      .group = r.world,
                                                      .overlap = overlap,
                                                      .delay_all_reduce_named_params = {"shared"},
                                                      .param_to_hook_all_reduce = "first"});
      const torch::Tensor batch = numbers({4, 8});
      for (int step = 0; step < 3; ++step) {
        whole->zero_grad();
        net->zero_grad(step == 2);
        loss_of(whole->forward(batch, false)).backward();
        loss_of(ddp->forward(shard(batch, r.rank, 2), true)).backward();
        expect_close(gradients_of(*net), gradients_of(*whole), 2e-6);
      }
      // Its last piece comes after the gradient of "middle".
      r.phase("another wrapper");
      auto wrong = std::make_shared<Checkpointed>();
      wrong->first.requires_grad_(false);
      DistributedDataParallel<Checkpointed> early(wrong, {.group = r.world,
                                                          .overlap = Overlap::inline_,
                                                          .delay_all_reduce_named_params = {"shared"},
                                                          .param_to_hook_all_reduce = "middle"});
      const torch::Tensor x = shard(batch, r.rank, 2).clone().requires_grad_();
      const Caught caught = catch_error([&] {
        for (int step = 0; step < 2; ++step) loss_of(early->forward(x, true)).backward();
      });
      EXPECT_TRUE(contains(caught.text, "parameter shared, whose all_reduce is delayed, got a gradient on rank"))
          << caught;
      EXPECT_TRUE(contains(caught.text, "after parameter middle")) << caught;
    });
  }
}

TEST(DdpDelay, InvalidUseThrows) {
  run_ranks({.n = 1}, [](Rank& r) {
    const auto expect_error = [&](DdpOptions options, const char* text) {
      options.group = r.world;
      const Caught caught =
          catch_error([&] { DistributedDataParallel<NetImpl> ddp(std::make_shared<NetImpl>(), options); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, text)) << caught;
    };
    expect_error({.delay_all_reduce_named_params = {"fc3.weight"}}, "\"fc3.weight\"");
    expect_error({.param_to_hook_all_reduce = "fc1.weight"}, "nothing to delay");
    expect_error({.delay_all_reduce_named_params = {"fc1.weight"}, .param_to_hook_all_reduce = "fc9"}, "\"fc9\"");
    expect_error({.delay_all_reduce_named_params = {"fc1.weight"}, .param_to_hook_all_reduce = "fc1.weight"}, "itself");
    expect_error({.delay_all_reduce_named_params = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}},
                 "every parameter");
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_step_test
