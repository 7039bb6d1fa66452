// Clipping gradients, and adding them up over small batches: equal to what one process with everything would have.
#include <gtest/gtest.h>

#include <cmath>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/dist.h>
#include <maniple/train/accumulation.h>
#include <maniple/train/clip_grad.h>
#include <maniple/train/ddp.h>

namespace maniple::harness::clip_accumulation_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

torch::Tensor parameter_with(const torch::Tensor& gradient) {
  auto parameter = torch::zeros(gradient.sizes(), gradient.options()).requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

std::vector<torch::Tensor> some_parameters() {
  return {parameter_with(numbers({3, 4}, 1)),
          parameter_with(numbers({7}, 2).to(torch::kFloat64)),
          torch::zeros({5}).requires_grad_(),  // has none
          parameter_with(numbers({6, 2}, 3).t()),
          parameter_with(torch::zeros({0})),
          parameter_with(numbers({8}, 4).to(torch::kBFloat16)),
          parameter_with(torch::tensor(2.0F))};
}

torch::Tensor all_gradients(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) flat.push_back(parameter.grad().to(torch::kFloat64).reshape({-1}));
  }
  return torch::cat(flat);
}

TEST(ClipGrad, NormsOfMixedGradients) {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.5, 1000.0, 0.0, kInfinity}) {
      auto parameters = some_parameters();
      const auto before = all_gradients(parameters);
      const double expected =
          before.abs().pow(std::isinf(p) ? 1 : p).sum().pow(std::isinf(p) ? 1 : 1 / p).item<double>();
      const double norm_before = std::isinf(p) ? before.abs().max().item<double>() : expected;
      const auto norm = clip_grad_norm_(parameters, max_norm, {.norm_type = p});
      EXPECT_EQ(norm.dim(), 0);
      EXPECT_EQ(norm.scalar_type(), torch::kFloat64);
      EXPECT_NEAR(norm.item<double>(), norm_before, 1e-6 * norm_before) << p;
      const double factor = std::min(1.0, max_norm / (norm_before + 1e-6));
      EXPECT_TRUE(torch::allclose(all_gradients(parameters), before * factor, 1e-2, 1e-6)) << p << " " << max_norm;
      if (factor == 1) {
        EXPECT_TRUE(torch::equal(all_gradients(parameters), before)) << "not touched";
      }
      EXPECT_FALSE(parameters[2].grad().defined());
    }
  }
}

TEST(ClipGrad, AsPyTorchDoes) {
  const auto make = [] {
    return std::vector<torch::Tensor>{parameter_with(numbers({3, 4}, 1)), parameter_with(numbers({6, 2}, 3).t())};
  };
  const auto ours = make();
  const auto theirs = make();
  const double norm = clip_grad_norm_(ours, 1.5).item<double>();
  EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(theirs, 1.5), 1e-5);
  EXPECT_TRUE(torch::allclose(all_gradients(ours), all_gradients(theirs)));
}

TEST(ClipGrad, BFloat16KeepsItsNorm) {
  // 65536 times 2^-8 in bfloat16: a sum of squares in bfloat16 would stand still at 1/256.
  const auto parameter = parameter_with(torch::full({65536}, 1.0 / 256, torch::kBFloat16));
  const auto norm = clip_grad_norm_(parameter, 0.5);
  EXPECT_EQ(norm.scalar_type(), torch::kFloat32);
  EXPECT_NEAR(norm.item<double>(), 1.0, 1e-5);
  EXPECT_NEAR(parameter.grad()[17].item<double>(), 0.5 / 256, 1e-5);
}

TEST(ClipGrad, NothingToClip) {
  EXPECT_EQ(clip_grad_norm_(std::vector<torch::Tensor>{}, 1).item<double>(), 0);
  EXPECT_EQ(clip_grad_norm_(torch::zeros({3}), 1, {.norm_type = kInfinity}).item<double>(), 0);
  EXPECT_EQ(clip_grad_norm_(parameter_with(torch::zeros({0})), 1, {.norm_type = kInfinity}).item<double>(), 0);
  const auto zero = parameter_with(torch::zeros({3}));
  EXPECT_EQ(clip_grad_norm_(zero, 0).item<double>(), 0);
  EXPECT_TRUE(zero.grad().eq(0).all().item<bool>()) << "0 / 0 is not NaN here";
}

TEST(ClipGrad, NumbersThatAreNotFinite) {
  for (const double wrong : {std::nan(""), kInfinity}) {
    for (const double p : {1.0, 2.0, kInfinity}) {
      const std::vector<torch::Tensor> parameters = {parameter_with(torch::ones({2})),
                                                     parameter_with(torch::tensor({{1.0, wrong, 2.0}}))};
      EXPECT_NE(error_of([&] {
                  clip_grad_norm_(parameters, 1, {.norm_type = p, .error_if_nonfinite = true});
                }).find("the gradient of parameter 1 of shape [1, 3] is not finite"),
                std::string::npos);
      EXPECT_EQ(parameters[0].grad()[0].item<double>(), 1) << "nothing was changed";
      EXPECT_FALSE(std::isfinite(clip_grad_norm_(parameters, 1, {.norm_type = p}).item<double>()));
      EXPECT_FALSE(std::isfinite(parameters[1].grad()[0][1].item<double>())) << "still to be seen";
    }
  }
}

TEST(ClipGrad, MistakesAreNamed) {
  const auto parameter = parameter_with(torch::ones({3}));
  EXPECT_NE(error_of([&] { clip_grad_norm_(parameter, -1); }).find("a max_norm of -1"), std::string::npos);
  EXPECT_NE(error_of([&] { clip_grad_norm_(parameter, std::nan("")); }).find("a max_norm of nan"), std::string::npos);
  EXPECT_NE(error_of([&] { clip_grad_norm_(parameter, 1, {.norm_type = 0}); }).find("a norm_type of 0"),
            std::string::npos);
  EXPECT_NE(error_of([&] { clip_grad_norm_(torch::Tensor(), 1); }).find("parameter 0 is undefined"), std::string::npos);
  EXPECT_NE(error_of([&] { clip_grad_value_(parameter, -1); }).find("a clip_value of -1"), std::string::npos);
  auto embedding = torch::zeros({4, 2}).requires_grad_();
  embedding.mutable_grad() = torch::ones({4, 2}).to_sparse();
  EXPECT_NE(error_of([&] { clip_grad_norm_(embedding, 1); }).find("parameter 0 is sparse"), std::string::npos);
}

TEST(ClipGrad, Values) {
  const auto parameter = parameter_with(torch::tensor({-3.0, -0.5, 0.25, 7.0, std::nan("")}));
  clip_grad_value_(parameter, 1);
  EXPECT_TRUE(torch::equal(parameter.grad().slice(0, 0, 4), torch::tensor({-1.0, -0.5, 0.25, 1.0})));
  EXPECT_TRUE(std::isnan(parameter.grad()[4].item<double>()));
}

// Each rank holds a part of the gradients, the last one none: together they are clipped as one process would.
TEST(ClipGrad, PartsOnSeveralRanks) {
  for (const int n : {2, 3}) {
    for (const double p : {1.0, 2.0, kInfinity}) {
      run_ranks({.n = n}, [n, p](Rank& r) {
        const auto whole = numbers({n - 1, 6});
        const auto reference = parameter_with(whole.clone());
        const double expected = clip_grad_norm_(reference, 0.7, {.norm_type = p}).item<double>();
        std::vector<torch::Tensor> own;
        if (r.rank < n - 1) own.push_back(parameter_with(whole[r.rank].clone()));
        const auto norm = clip_grad_norm_(own, 0.7, {.norm_type = p, .group = r.world});
        EXPECT_NEAR(norm.item<double>(), expected, 1e-5);
        if (!own.empty()) {
          EXPECT_TRUE(torch::allclose(own[0].grad(), reference.grad()[r.rank]));
        }
        // NaN on one rank is an error on all, or is seen on all.
        if (!own.empty() && r.rank == 0) own[0].mutable_grad()[0].fill_(std::nan(""));
        EXPECT_NE(
            error_of([&] { clip_grad_norm_(own, 1, {.norm_type = p, .error_if_nonfinite = true, .group = r.world}); }),
            "no error");
        EXPECT_TRUE(std::isnan(clip_grad_norm_(own, 1, {.norm_type = p, .group = r.world}).item<double>()));
      });
    }
  }
}

// ---- Accumulation ---------------------------------------------------------------------------------------------------

Gradients reference_of(const torch::Tensor& batch) {
  Net net;
  fill(*net, 5);
  loss_of(net(batch)).backward();
  return gradients_of(*net);
}

// Eleven small batches in groups of four: 4, 4, 3. Each group's gradient equals the whole batch's.
TEST(Accumulation, EqualsTheLargeBatch) {
  for (const int n : {1, 2, 3}) {
    for (const bool view : {true, false}) {
      run_ranks({.n = n}, [n, view](Rank& r) {
        Net net;
        fill(*net, 5);
        DistributedDataParallel ddp(net, {.gradient_as_bucket_view = view, .group = r.world});
        Accumulation accumulation(ddp, 4);
        const int batches = 11;
        const int rows = 2;  // of each rank, in each small batch
        const auto data = numbers({batches, n * rows, 8});
        int first = 0, groups = 0;
        for (int i = 0; i < batches; ++i) {
          {
            const auto scope = accumulation.step(i + 1 == batches);
            accumulation.scale(loss_of(ddp.forward(shard(data[i], r.rank, n)))).backward();
          }
          EXPECT_EQ(accumulation.ready(), i == 3 || i == 7 || i == 10) << i;
          EXPECT_EQ(accumulation.pending(), accumulation.ready() ? 0 : i - first + 1);
          if (!accumulation.ready()) continue;
          expect_close(gradients_of(*net), reference_of(data.slice(0, first, i + 1).reshape({-1, 8})), 3e-6);
          expect_same_everywhere(r, *net);
          first = i + 1;
          ++groups;
          for (auto& parameter : net->parameters()) parameter.mutable_grad().zero_();
        }
        EXPECT_EQ(groups, 3);
        EXPECT_EQ(ddp.statistics().backwards, 3u) << "one communication for each group";
      });
    }
  }
}

// Batches of 1, 5 and 2 rows (and on rank 1 of 3, 0 and 4): the mean is over samples, over batches as over ranks.
TEST(Accumulation, BatchesOfDifferentSizes) {
  run_ranks({.n = 2}, [](Rank& r) {
    Net net;
    fill(*net, 5);
    DistributedDataParallel ddp(net, {.group = r.world, .average = Average::samples});
    Accumulation accumulation(ddp, 3);
    const auto data = numbers({15, 8});
    const std::vector<int> sizes = r.rank == 0 ? std::vector<int>{1, 5, 2} : std::vector<int>{3, 0, 4};
    for (int round = 0; round < 2; ++round) {
      int from = r.rank == 0 ? 0 : 8;
      for (const int size : sizes) {
        const auto scope = accumulation.step();
        const auto part = data.slice(0, from, from + size);
        accumulation.scale(loss_of(ddp.forward(part)), size).backward();
        from += size;
      }
      ASSERT_TRUE(accumulation.ready());
      expect_close(gradients_of(*net), reference_of(data), 3e-6);
      for (auto& parameter : net->parameters()) parameter.mutable_grad().zero_();
    }
  });
}

TEST(Accumulation, WithoutRanks) {
  Net net;
  fill(*net, 5);
  Accumulation accumulation(net->parameters(), 2);
  EXPECT_THROW(accumulation.scale(torch::ones({})), InvalidArgument) << "before step";
  const auto data = numbers({6, 8});
  for (int i = 0; i < 2; ++i) {
    const auto scope = accumulation.step();
    accumulation.scale(loss_of(net(data.slice(0, 3 * i, 3 * i + 3)))).backward();
  }
  EXPECT_TRUE(accumulation.ready());
  expect_close(gradients_of(*net), reference_of(data), 3e-6);
  // A loop that broke off: what it left is dropped, and the next group is whole.
  {
    const auto scope = accumulation.step();
  }
  EXPECT_EQ(accumulation.pending(), 1);
  accumulation.reset();
  EXPECT_EQ(accumulation.pending(), 0);
  {
    const auto scope = accumulation.step();
  }
  EXPECT_FALSE(accumulation.ready());
  {
    const auto scope = accumulation.step();
  }
  EXPECT_TRUE(accumulation.ready());
  EXPECT_THROW(Accumulation(net->parameters(), 0), InvalidArgument);
  Accumulation one(net->parameters(), 1);
  const auto scope = one.step();
  EXPECT_TRUE(one.ready());
  EXPECT_EQ(one.scale(torch::ones({})).item<double>(), 1);
  EXPECT_THROW(one.scale(torch::ones({}), -1), InvalidArgument);
}

}  // namespace
}  // namespace maniple::harness::clip_accumulation_test
