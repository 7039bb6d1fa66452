// Pipelines: gradients, losses and errors.
#include <algorithm>
#include <cmath>
#include <set>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::pipeline_test {
namespace {

namespace nn = torch::nn;

constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine

// ---- Ranks ----------------------------------------------------------------------------------------------------------

/// From tokens [rows, 3]; activations of several shapes, operations in place at the beginning of stages.
nn::Sequential layers() {
  nn::Sequential all(nn::Embedding(16, 8), nn::Linear(8, 16), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(16, 16),
                     nn::Tanh(), nn::Linear(16, 12), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(12, 6));
  fill(*all, 3);
  return all;
}
torch::Tensor tokens(std::int64_t rows, int seed = 0) {
  return ((torch::arange(rows * 3) * 7 + seed) % 16).view({rows, 3}).to(training_device());
}
torch::Tensor target(std::int64_t rows, int seed = 1) { return numbers({rows, 3, 6}, seed); }
torch::Tensor mean_loss(const torch::Tensor& y, const torch::Tensor& t) {
  return (y - t).pow(2).flatten(1).sum(1).mean();
}

std::vector<torch::Tensor> each_once(const nn::Sequential& model) {
  std::vector<torch::Tensor> result;
  std::set<const void*> seen;
  for (const auto& parameter : model->parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) result.push_back(parameter);
  }
  return result;
}

/// One process that goes through the same micro-batches one after the other.
double reference_step(nn::Sequential& whole, const torch::Tensor& x, const torch::Tensor& t,
                      std::int64_t micro_batches) {
  const auto xs = x.chunk(micro_batches), ts = t.chunk(micro_batches);
  double sum = 0;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const double rows = static_cast<double>(xs[i].size(0)), all = static_cast<double>(x.size(0));
    const auto loss = mean_loss(whole->forward(xs[i]), ts[i]);
    (loss * (rows / all)).backward();
    sum += loss.item<double>() * rows;
  }
  return sum / static_cast<double>(x.size(0));
}

/// On a GPU a library may choose another kernel for the same shapes, and kernels add in different orders.
void expect_loss(double actual, double expected) {
  if (test_device().is_cpu()) {
    EXPECT_DOUBLE_EQ(actual, expected);
  } else {
    EXPECT_NEAR(actual, expected, 1e-5 * std::max(1.0, std::abs(expected)));
  }
}

/// The fewest that are worth the time it takes to start them, where they are processes.
std::vector<int> numbers_of_ranks() {
  return test_device().is_cpu() ? std::vector<int>{1, 2, 3, 4} : std::vector<int>{2, 4};
}

/// Of a pipeline's parameters, by their names in the Sequential: without "stage3.".
Gradients own_gradients(const Pipeline& pipeline) {
  Gradients result;
  for (const auto& [name, gradient] : gradients_of(pipeline)) result[name.substr(name.find('.') + 1)] = gradient;
  return result;
}

void expect_those_of(nn::Sequential& whole, const Pipeline& pipeline, double tolerance = 0) {
  if (!test_device().is_cpu()) tolerance = std::max(tolerance, 1e-5);
  const Gradients all = gradients_of(*whole);
  Gradients expected;
  for (const auto& [name, gradient] : own_gradients(pipeline)) expected[name] = all.at(name);
  tolerance == 0 ? expect_identical(own_gradients(pipeline), expected)
                 : expect_close(own_gradients(pipeline), expected, tolerance);
}

struct Case {
  PipelineSchedule schedule;
  std::size_t stages_per_rank;
  bool dynamic_shapes = false;
};

TEST(Pipeline, GradientsHaveTheBitsOfOneProcess) {
  for (const int ranks : numbers_of_ranks()) {
    run_ranks({.n = ranks, .limit = kLimit}, [](Rank& r) {
      for (const Case& one :
           {Case{PipelineSchedule::gpipe, 1}, Case{PipelineSchedule::gpipe, 2}, Case{PipelineSchedule::one_f_one_b, 1},
            Case{PipelineSchedule::interleaved, 2}, Case{PipelineSchedule::one_f_one_b, 1, true}}) {
        nn::Sequential whole = layers();
        const auto cut = cut_into_stages(layers(), {.group = r.world, .stages_per_rank = one.stages_per_rank});
        EXPECT_TRUE(cut.tied.empty());
        Pipeline pipeline(cut.stages, {.micro_batches = 4,
                                       .schedule = one.schedule,
                                       .loss = mean_loss,
                                       .dynamic_shapes = one.dynamic_shapes,
                                       .group = r.world});
        torch::optim::SGD optimizer(pipeline.trained_parameters(), 0.05), reference(each_once(whole), 0.05);
        // Rows that divide, that do not, fewer than micro-batches, and the first number again.
        for (const std::int64_t rows : {8, 10, 3, 1, 8, 10}) {
          const auto x = tokens(rows, static_cast<int>(rows)), t = target(rows);
          pipeline.zero_grad();
          whole->zero_grad();
          const double expected = reference_step(whole, x, t, 4);
          expect_loss(pipeline.step(x, t), expected);
          expect_those_of(whole, pipeline);
          optimizer.step();
          reference.step();
        }
        EXPECT_EQ(pipeline.statistics().steps, 6u) << pipeline.statistics().text();
        const torch::NoGradGuard no_grad;
        const auto output = pipeline.forward(tokens(7));
        EXPECT_EQ(output.defined(), pipeline.has_last_stage());
        if (output.defined()) {
          // Other numbers of rows: products are summed in another order, by some kernels.
          EXPECT_TRUE(torch::allclose(output, whole->forward(tokens(7)), 1e-5, test_device().is_cpu() ? 1e-6 : 1e-5));
        }
        EXPECT_NEAR(pipeline.evaluate(tokens(7), target(7)),
                    mean_loss(whole->forward(tokens(7)), target(7)).item<double>(), 1e-5);
        const auto none = pipeline.forward(tokens(0));
        if (none.defined()) {
          EXPECT_EQ(none.sizes(), (std::vector<std::int64_t>{0, 3, 6}));
        }
      }
    });
  }
}

// Gradients add up over steps; what requires none gets none, and that may change; stages of very different sizes.
TEST(Pipeline, FrozenLayersAccumulationAndStagesByHand) {
  run_ranks({.n = 3}, [](Rank& r) {
    nn::Sequential whole = layers(), own = layers();
    const auto cut = cut_into_stages(own, {.group = r.world, .begins = {0, 1, 7}});
    Pipeline pipeline(cut.stages, {.micro_batches = 3, .loss = mean_loss, .group = r.world});
    const auto freeze = [&](const std::vector<std::size_t>& which, bool trained) {
      for (nn::Sequential* model : {&whole, &own}) {
        for (const std::size_t i : which) {
          for (auto& parameter : (*model)->ptr(i)->parameters()) parameter.set_requires_grad(trained);
        }
      }
    };
    const auto step = [&](int seed) {
      expect_loss(pipeline.step(tokens(6, seed), target(6)), reference_step(whole, tokens(6, seed), target(6), 3));
      expect_those_of(whole, pipeline);
    };
    step(1);
    step(2);
    freeze({0}, false);  // the whole first stage: no gradient is sent to it
    step(3);
    freeze({1, 3, 5}, false);  // the whole second one, too
    step(4);
    freeze({0}, true);
    step(5);
    pipeline.eval();
    step(6);
  });
}

TEST(Pipeline, ActivationCheckpointingChangesNothing) {
  run_ranks({.n = 2}, [](Rank& r) {
    // Without operations in place, which checkpointing refuses on its input.
    const auto make = [] {
      nn::Sequential all(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 6));
      fill(*all, 3);
      return all;
    };
    nn::Sequential whole = make();
    Pipeline pipeline(cut_into_stages(make(), {.group = r.world}).stages,
                      {.micro_batches = 3, .loss = mean_loss, .activation_checkpointing = true, .group = r.world});
    const auto x = numbers({5, 3, 6});
    expect_loss(pipeline.step(x, target(5)), reference_step(whole, x, target(5), 3));
    expect_those_of(whole, pipeline);
  });
}

/// Shares its weight with the embedding.
struct HeadImpl : nn::Module {
  explicit HeadImpl(const torch::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  torch::Tensor forward(const torch::Tensor& x) { return x.matmul(weight.t()).narrow(-1, 0, 6); }
  torch::Tensor weight;
};
TORCH_MODULE(Head);

nn::Sequential tied_layers(int seed) {
  nn::Embedding embedding(16, 8);
  nn::Sequential all(embedding, nn::Linear(8, 8), nn::Tanh(), Head(embedding->weight));
  fill(*all, seed);
  return all;
}

TEST(Pipeline, TiedParametersStayEqual) {
  for (const std::size_t stages_per_rank : {1, 2}) {
    run_ranks({.n = 2}, [stages_per_rank](Rank& r) {
      nn::Sequential whole = tied_layers(3);
      nn::Sequential own = tied_layers(3);
      if (r.rank == 1) {
        const torch::NoGradGuard no_grad;
        own->ptr(0)->as<nn::Embedding>()->weight.add_(1);  // rank 0's values count
      }
      const auto cut = cut_into_stages(own, {.group = r.world, .stages_per_rank = stages_per_rank});
      ASSERT_EQ(cut.tied.size(), 1u);
      EXPECT_EQ(cut.tied.front().first, "0.weight");
      Pipeline pipeline(cut.stages, {.micro_batches = 3,
                                     .schedule = PipelineSchedule::interleaved,
                                     .loss = mean_loss,
                                     .group = r.world,
                                     .tied = cut.tied});
      torch::optim::SGD optimizer(pipeline.trained_parameters(), 0.05), reference(each_once(whole), 0.05);
      for (int step = 0; step < 6; ++step) {
        if (step % 2 == 0) {  // gradients of two steps add up
          pipeline.zero_grad();
          whole->zero_grad();
        }
        EXPECT_NEAR(pipeline.step(tokens(7, step), target(7)), reference_step(whole, tokens(7, step), target(7), 3),
                    1e-4);
        const auto expected = whole->ptr(0)->as<nn::Embedding>()->weight.grad();
        EXPECT_TRUE(torch::allclose(cut.tied.front().second.grad(), expected, 1e-4, 1e-5)) << step;
        if (step % 2 == 0) continue;
        optimizer.step();
        reference.step();
      }
      torch::Tensor first = cut.tied.front().second.detach().clone();
      broadcast(first, 0, {.group = r.world});
      EXPECT_TRUE(torch::equal(first, cut.tied.front().second)) << "the same bits on both";
    });
  }
}

// Two pipelines of two ranks each.
TEST(Pipeline, GradientsAreAveragedOverPipelines) {
  for (const std::size_t stages_per_rank : {1, 2}) {
    run_ranks({.n = 4}, [stages_per_rank](Rank& r) {
      const auto pipe = r.world->split(r.rank / 2), data = r.world->split(r.rank % 2);
      nn::Sequential whole = layers(), own = layers();
      if (r.rank >= 2) fill(*own, 9);  // the first pipeline's values count
      Pipeline pipeline(cut_into_stages(own, {.group = pipe, .stages_per_rank = stages_per_rank}).stages,
                        {.micro_batches = 2,
                         .schedule = PipelineSchedule::interleaved,
                         .loss = mean_loss,
                         .group = pipe,
                         .data_group = data,
                         .ddp = {.bucket_cap_mb = kTiny}});
      torch::optim::SGD optimizer(pipeline.trained_parameters(), 0.05), reference(each_once(whole), 0.05);
      for (int step = 0; step < 4; ++step) {
        const auto x = tokens(12, step), t = target(12, step);
        pipeline.zero_grad();
        whole->zero_grad();
        const double loss = pipeline.step(shard(x, r.rank / 2, 2), shard(t, r.rank / 2, 2));
        double mean = loss;
        data->all_reduce(buffer_of(mean), ReduceOp::avg);
        EXPECT_NEAR(mean, reference_step(whole, x, t, 4), 1e-5);
        expect_those_of(whole, pipeline, 1e-5);
        optimizer.step();
        reference.step();
      }
      for (const auto& parameter : pipeline.parameters()) {
        torch::Tensor first = parameter.detach().clone();
        broadcast(first, GroupRank{0}, {.group = data});
        EXPECT_TRUE(torch::equal(first, parameter));
      }
    });
  }
}

// ---- Errors ---------------------------------------------------------------------------------------------------------

TEST(Pipeline, MistakesAreNamedOnAllRanksAndForgiven) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto expect = [&](const auto& call, const std::string& part) {
      const Caught caught = catch_error(call);
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, part))
          << caught << "; expected: " << part;
    };
    const auto stages = cut_into_stages(layers(), {.group = r.world}).stages;
    const auto make = [&](PipelineOptions options) {
      options.group = r.world;
      Pipeline(stages, options);
    };
    expect([&] { make({.micro_batches = r.rank == 0 ? 2 : 3}); }, "rank 0 has 1 stages, 2 micro-batches");
    expect([&] { make({.micro_batches = r.rank == 0 ? 2 : 0}); }, "rank 1: 0 micro-batches");
    expect([&] { make({.tied = {{r.rank == 0 ? "a" : "b", torch::zeros({2}, training_device())}}}); },
           "tied parameter a is on rank 0 only");
    expect([&] { make({.tied = {{"a", torch::zeros({r.rank + 1}, training_device())}}}); },
           "Float[1] on rank 0, but Float[2] on rank 1");
    expect([&] { Pipeline({}, {.group = r.world}); }, "no stages");
    expect(
        [&] {
          Pipeline({stages.front(), stages.front()},
                   {.schedule = PipelineSchedule::gpipe, .group = r.world, .data_group = r.world});
        },
        "rank 0: two stages share the parameter");
    expect(
        [&] {
          Pipeline(cut_into_stages(layers(), {.group = r.world, .stages_per_rank = 2}).stages, {.group = r.world});
        },
        "take PipelineSchedule::interleaved");
    expect([&] { cut_into_stages(layers(), {.group = r.world, .begins = {0, 8}}); }, "2 rising numbers, 0 first");
    expect([&] { cut_into_stages(layers(), {.group = r.world, .stages_per_rank = 5}); }, "cannot be cut into 10");

    Pipeline without(stages, {.micro_batches = 2, .group = r.world});
    expect([&] { without.step(tokens(4), target(4)); }, "needs PipelineOptions::loss");
    Pipeline pipeline(stages, {.micro_batches = 2, .loss = mean_loss, .group = r.world});
    expect([&] { pipeline.step(tokens(4), target(5)); }, "input of rank 0 has 4 rows, but the target of rank 1 has 5");
    expect([&] { pipeline.step({}, target(5)); }, "on rank 0: the rank of the first stage needs an input");
    expect([&] { pipeline.step(tokens(4), {}); }, "on rank 1: the rank of the last stage needs a target");
    expect([&] { pipeline.step(tokens(0), target(0)); }, "no rows");
    expect([&] { r.rank == 0 ? pipeline.step(tokens(4), target(4)) : pipeline.evaluate(tokens(4), target(4)); },
           "rank 0 calls step, but rank 1 calls evaluate");
    expect([&] { pipeline.to(torch::kFloat64); }, "make the Pipeline then");
    // Each rank needs only its own.
    nn::Sequential whole = layers();
    expect_loss(pipeline.step(r.rank == 0 ? tokens(4) : torch::Tensor(), r.rank == 1 ? target(4) : torch::Tensor()),
                reference_step(whole, tokens(4), target(4), 2));
  });
}

/// Fails in the second call, or returns fewer columns for negative numbers.
struct WildImpl : nn::Module {
  WildImpl() { register_buffer("here", torch::zeros({1}, training_device())); }  // a stage is where its tensors are
  torch::Tensor forward(torch::Tensor x) {
    if (++calls == fails) throw std::runtime_error("failed on purpose");
    return cuts && x.sum().item<double>() < 0 ? x.narrow(1, 0, 2) : x;
  }
  int calls = 0, fails = 0;
  bool cuts = false;
};
TORCH_MODULE(Wild);

TEST(Pipeline, AStageThatThrowsEndsTheStepOnAllRanks) {
  run_ranks({.n = 3}, [](Rank& r) {
    Wild wild;
    if (r.rank == 1) wild->fails = 2;
    Pipeline pipeline({nn::AnyModule(wild)}, {.micro_batches = 4, .loss = mean_loss, .group = r.world});
    std::string text = "no error";
    try {
      pipeline.step(numbers({8, 3, 6}), target(8));
    } catch (const std::exception& error) {
      text = error.what();
    }
    if (r.rank == 1) {
      EXPECT_EQ(text, "failed on purpose");
    } else {
      EXPECT_TRUE(contains(text, "forward of stage 1, micro-batch 1 of 4 failed on rank 1: failed on purpose")) << text;
    }
    EXPECT_TRUE(catch_error([&] { pipeline.step(numbers({8, 3, 6}), target(8)); }).is(ErrorKind::aborted));
    r.world->barrier();  // the group that was given is not touched
  });
}

TEST(Pipeline, ShapesThatDependOnValuesAreNoticedOrSent) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto loss = [](const torch::Tensor& y, const torch::Tensor&) { return y.pow(2).mean(); };
    const auto positive = torch::ones({4, 3}).to(training_device()), negative = -positive;
    for (const bool dynamic : {true, false}) {
      Wild wild;
      wild->cuts = r.rank == 0;
      Pipeline pipeline({nn::AnyModule(wild)},
                        {.micro_batches = 2, .loss = loss, .dynamic_shapes = dynamic, .group = r.world});
      pipeline.evaluate(positive, positive);
      const Caught caught = catch_error([&] { pipeline.evaluate(negative, positive); });
      EXPECT_EQ(caught.any, !dynamic) << caught;
      if (!dynamic) {
        EXPECT_TRUE(contains(caught.text, "need .dynamic_shapes = true")) << caught;
      }
    }
  });
}

TEST(Pipeline, AKilledRankIsNamed) {
  run_ranks({.n = 3, .as = As::processes, .limit = kLimit, .fault = kill_at(1, 3)}, [](Rank& r) {
    Pipeline pipeline(cut_into_stages(layers(), {.group = r.world}).stages,
                      {.micro_batches = 4, .loss = mean_loss, .group = r.world});
    const Caught caught = catch_error([&] {
      for (int step = 0; step < 100; ++step) {
        r.step();
        pipeline.step(tokens(8), target(8));
      }
    });
    EXPECT_TRUE(caught.any && contains(caught.text, "rank 1")) << caught;
  });
}

}  // namespace
}  // namespace maniple::harness::pipeline_test
