// PowerSGD against its definition, written down once more with a QR decomposition on the gradients of all ranks.
#include "comm/base/format.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/ddp/hooks/hook_parts.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_power_sgd_test {
namespace {

const PrescribedGradients::Shapes kShapes = {{"matrix", {20, 16}}, {"tall", {24, 3, 4}}, {"image", {8, 4, 3, 3}},
                                             {"bias", {20}},       {"small", {3, 3}},    {"nothing", {0, 4}}};
const std::vector<std::string> kCompressed = {"matrix", "tall", "image"};

std::int64_t columns_of(const torch::Tensor& tensor) { return tensor.numel() / tensor.size(0); }
torch::Tensor orthonormal(const torch::Tensor& matrix) { return std::get<0>(torch::linalg_qr(matrix)); }

/// The algorithm for all ranks at once, in float64.
struct Reference {
  std::vector<Gradients> errors;
  Gradients q;
  bool feedback = true;

  Gradients step(std::vector<Gradients> given) {
    const auto n = static_cast<double>(given.size());
    Gradients result = mean_of(given);
    if (errors.empty()) errors.resize(given.size());
    for (const std::string& name : kCompressed) {
      const torch::Tensor start = orthonormal(q.at(name));
      torch::Tensor p, back;
      std::vector<torch::Tensor> matrices;
      for (std::size_t r = 0; r < given.size(); ++r) {
        torch::Tensor m = given[r].at(name).reshape({given[r].at(name).size(0), -1});
        if (feedback && errors[r].count(name) != 0) m = m + errors[r].at(name);
        matrices.push_back(m);
        p = p.defined() ? p + m.mm(start) : m.mm(start);
      }
      p = orthonormal(p);
      for (const torch::Tensor& m : matrices) back = back.defined() ? back + m.t().mm(p) / n : m.t().mm(p) / n;
      const torch::Tensor product = p.mm(back.t());
      q[name] = back;
      for (std::size_t r = 0; r < given.size(); ++r) errors[r][name] = matrices[r] - product;
      result[name] = product.view(given[0].at(name).sizes());
    }
    return result;
  }
};

Gradients first_q(std::int64_t r) {
  Gradients result;
  for (const auto& [name, gradient] : gradients_in(kShapes, 0, 0)) {
    if (gradient.dim() > 1 && gradient.numel() > 0) {
      result[name] = random_matrix(columns_of(gradient), r, torch::kFloat64, 17);
    }
  }
  return result;
}

std::vector<Gradients> of_all(int n, int step) {
  std::vector<Gradients> all;
  for (int r = 0; r < n; ++r) all.push_back(gradients_in(kShapes, r, step));
  return all;
}

struct Setting {
  std::string name;
  int n;
  torch::ScalarType dtype = torch::kFloat32;
  Overlap overlap = Overlap::none;
  double bucket_mb = 25;
  bool views = true;
  bool feedback = true;
};

class PowerSgd : public testing::TestWithParam<Setting> {};

TEST_P(PowerSgd, FollowsItsDefinition) {
  const Setting& setting = GetParam();
  run_ranks({.n = setting.n}, [&](Rank& r) {
    auto net = std::make_shared<PrescribedGradients>(kShapes, setting.dtype);
    DistributedDataParallel<PrescribedGradients> ddp(net, {.bucket_cap_mb = setting.bucket_mb,
                                                           .first_bucket_mb = setting.bucket_mb,
                                                           .gradient_as_bucket_view = setting.views,
                                                           .group = r.world,
                                                           .overlap = setting.overlap});
    auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{
        .matrix_approximation_rank = 2, .start_powerSGD_iter = 1, .use_error_feedback = setting.feedback});
    Reference reference;
    reference.feedback = setting.feedback;
    reference.q = first_q(2);
    std::map<std::string, torch::Tensor> start = {{"iteration", torch::zeros({1}, torch::kInt64)}};
    for (const std::string& name : kCompressed) start["q/" + name] = reference.q.at(name).clone();
    state->load_state_dict(start);
    ddp.register_comm_hook(powerSGD_hook(state));
    for (int step = 0; step < 6; ++step) {
      net->zero_grad(step % 2 == 1);
      net->loss(gradients_in(kShapes, r.rank, step)).backward();
      // The first step is averaged as it is.
      const Gradients expected = step == 0 ? mean_of(of_all(r.size, 0)) : reference.step(of_all(r.size, step));
      expect_close(gradients_of(*net), expected,
                   setting.dtype == torch::kBFloat16 ? 4e-2 : 20 * tolerance(setting.dtype));
      expect_same_everywhere(r, *net);
    }
    EXPECT_EQ(state->iteration(), 6);
    EXPECT_EQ(state->state_dict().count("error/bias"), setting.feedback ? 1u : 0u);
    if (r.size > 1 && setting.dtype == torch::kFloat32) {
      EXPECT_GT(state->traffic().compression_rate(), 1.3) << "one of six steps is plain";
    }
  });
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const int n : {1, 2, 3, 4}) all.push_back({format_text("{}Ranks", n), n});
  all.push_back({"Float64", 3, torch::kFloat64});
  all.push_back({"BFloat16", 2, torch::kBFloat16});
  all.push_back({"ManyBucketsInline", 2, torch::kFloat32, Overlap::inline_, kTiny});
  all.push_back({"ManyBucketsThread", 3, torch::kFloat64, Overlap::thread, kTiny});
  all.push_back({"NoViews", 2, torch::kFloat32, Overlap::thread, kTiny, false});
  all.push_back({"NoFeedback", 2, torch::kFloat64, Overlap::none, 25, true, false});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Ddp, PowerSgd, testing::ValuesIn(settings()),
                         [](const testing::TestParamInfo<Setting>& one) { return one.param.name; });

// Every rank's gradient is A times something of its own: the average has the rank of A.
TEST(DdpPowerSgd, LowRankGradientsAreExact) {
  const PrescribedGradients::Shapes shapes = {
      {"two", {30, 20}}, {"one", {30, 20}}, {"zero", {30, 20}}, {"image", {10, 4, 3, 3}}};
  for (const bool warm : {true, false}) {
    for (const int n : {1, 2, 4}) {
      run_ranks({.n = n}, [&](Rank& r) {
        const auto given = [&](int rank, int step) {
          Gradients result;
          const torch::Tensor left = gradients_in({{"x", {30, 2}}}, 50, step).at("x");
          const torch::Tensor right = gradients_in({{"x", {2, 36}}}, rank, step).at("x");
          result["two"] = left.mm(right.narrow(1, 0, 20));
          result["one"] = left.narrow(1, 0, 1).mm(right.narrow(0, 0, 1).narrow(1, 0, 20));
          result["zero"] = torch::zeros({30, 20}, torch::kFloat64);
          result["image"] = left.narrow(0, 0, 10).mm(right).view({10, 4, 3, 3});
          return result;
        };
        auto net = std::make_shared<PrescribedGradients>(shapes);
        DistributedDataParallel<PrescribedGradients> ddp(net, {.group = r.world});
        auto state = std::make_shared<PowerSGDState>(
            PowerSGDOptions{.matrix_approximation_rank = 3, .start_powerSGD_iter = 0, .warm_start = warm});
        ddp.register_comm_hook(powerSGD_hook(state));
        for (int step = 0; step < 4; ++step) {
          net->zero_grad();
          net->loss(given(r.rank, step)).backward();
          std::vector<Gradients> all;
          for (int other = 0; other < r.size; ++other) all.push_back(given(other, step));
          expect_close(gradients_of(*net), mean_of(all), 1e-5);
        }
      });
    }
  }
}

TEST(DdpPowerSgd, StateIsSavedLoadedAndAveraged) {
  run_ranks({.n = 3}, [](Rank& r) {
    const PowerSGDOptions options{.matrix_approximation_rank = 2, .start_powerSGD_iter = 1, .random_seed = 5};
    const std::string file = format_text("{}/power_sgd.{}", r.dir(), r.rank);
    // Steps [from, to) with a module and a wrapper of their own.
    const auto train = [&](int from, int to, const std::shared_ptr<PowerSGDState>& state, double bucket_mb) {
      auto net = std::make_shared<PrescribedGradients>(kShapes);
      DistributedDataParallel<PrescribedGradients> ddp(
          net, {.bucket_cap_mb = bucket_mb, .first_bucket_mb = bucket_mb, .group = r.world});
      ddp.register_comm_hook(powerSGD_hook(state));
      for (int step = from; step < to; ++step) {
        net->zero_grad();
        net->loss(gradients_in(kShapes, r.rank, step)).backward();
      }
      return gradients_of(*net);
    };
    const Gradients straight = train(0, 6, std::make_shared<PowerSGDState>(options), 25);
    auto before = std::make_shared<PowerSGDState>(options);
    train(0, 3, before, 25);
    before->save(file);
    auto after = std::make_shared<PowerSGDState>(options);
    after->load(file);
    EXPECT_EQ(after->iteration(), 3);
    const Gradients resumed = train(3, 6, after, kTiny);  // in other buckets even
    if (training_device().is_cpu()) {
      expect_identical(resumed, straight);
    } else {
      expect_close(resumed, straight, 1e-5);  // products depend on where matrices begin
    }

    // Only the average of the errors counts.
    before->average_errors(*r.world);
    for (const auto& [name, tensor] : before->state_dict()) {
      if (tensor.device() != training_device()) continue;  // the number of steps
      torch::Tensor root = tensor.clone();
      broadcast(root, 0, {.group = r.world});
      EXPECT_TRUE(torch::equal(root, tensor)) << name;
    }
    expect_close(train(3, 6, before, 25), straight, 1e-4);

    // What does not fit is an error.
    const auto expect_error = [](auto call, const char* text) {
      const Caught caught = catch_error(call);
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, text)) << caught;
    };
    expect_error([&] { after->load_state_dict({{"momentum", torch::zeros({1})}}); }, "momentum");
    expect_error([&] { after->load_state_dict({}); }, "iteration is missing");
    auto wrong = after->state_dict();
    wrong["error/matrix"] = torch::zeros({4});
    after->load_state_dict(wrong);
    expect_error([&] { train(3, 4, after, 25); }, "parameter matrix");
    expect_error([] { PowerSGDState({.matrix_approximation_rank = 0}); }, "matrix_approximation_rank is 0");
    expect_error([] { PowerSGDState({.start_powerSGD_iter = -1}); }, "start_powerSGD_iter");
    expect_error([] { PowerSGDState({.min_compression_rate = 0}); }, "min_compression_rate");
    expect_error([] { powerSGD_hook(nullptr); }, "null");
  });
}

TEST(DdpPowerSgd, AnInfiniteGradientIsSeenAndForgotten) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<PrescribedGradients>(kShapes);
    DistributedDataParallel<PrescribedGradients> ddp(net, {.group = r.world});
    auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.start_powerSGD_iter = 0});
    ddp.register_comm_hook(powerSGD_hook(state));
    for (int step = 0; step < 3; ++step) {
      Gradients expected = gradients_in(kShapes, r.rank, step);
      if (step == 1 && r.rank == 1) expected["matrix"][2][3] = std::numeric_limits<double>::infinity();
      net->zero_grad(true);
      net->loss(expected).backward();
      EXPECT_EQ(torch::isfinite(net->named_parameters()["matrix"].grad()).all().item<bool>(), step != 1);
      EXPECT_TRUE(torch::isfinite(net->named_parameters()["bias"].grad()).all().item<bool>());
      for (const auto& [name, tensor] : state->state_dict()) {
        EXPECT_TRUE(torch::isfinite(tensor).all().item<bool>()) << name << " in step " << step;
      }
    }
  });
}

TEST(DdpPowerSgd, TrainsNearlyAsWellAsThePlainAverage) {
  run_ranks({.n = 2}, [](Rank& r) {
    const torch::Tensor batch = numbers({16, 8}, r.rank), target = torch::sin(batch.narrow(1, 0, 4) * 2);
    double first = 0;
    const auto last_loss_with = [&](const CommHook& hook) {
      auto net = std::make_shared<NetImpl>(32);
      fill(*net, 3);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      ddp.register_comm_hook(hook);
      torch::optim::SGD optimizer(net->parameters(), 0.02);
      double last = 0;
      for (int step = 0; step < 250; ++step) {
        optimizer.zero_grad();
        const torch::Tensor loss = loss_of(ddp->forward(batch) - target);
        loss.backward();
        optimizer.step();
        (step == 0 ? first : last) = loss.item<double>();
      }
      expect_same_everywhere(r, *net, false);
      return last;
    };
    auto state = std::make_shared<PowerSGDState>(
        PowerSGDOptions{.matrix_approximation_rank = 1, .start_powerSGD_iter = 2, .min_compression_rate = 1.5});
    const double power = last_loss_with(powerSGD_hook(state)), plain = last_loss_with(allreduce_hook());
    EXPECT_LT(power, 0.6 * first);
    EXPECT_LT(power, 1.3 * plain + 0.05 * first);
    EXPECT_GT(state->traffic().compression_rate(), 1.5);
  });
}

TEST(Orthogonalize, ColumnsAreOrthonormalForEveryInput) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    torch::Tensor deficient = random_matrix(40, 5, dtype, 3);
    deficient.select(1, 2).copy_(deficient.select(1, 0) * 2 - deficient.select(1, 1));
    deficient.select(1, 4).zero_();
    for (const torch::Tensor& given : {random_matrix(40, 5, dtype, 1), random_matrix(5, 5, dtype, 2), deficient,
                                       torch::zeros({6, 6}, dtype), torch::ones({1, 1}, dtype)}) {
      for (const bool by_tensors : {false, true}) {
        const torch::Tensor before = by_tensors ? given.to(training_device()) : given.clone(), after = before.clone();
        by_tensors ? orthogonalize_by_tensors(after, 0) : orthogonalize(after, 0, 9);
        const double small = dtype == torch::kFloat64 ? 1e-12 : 1e-5;
        const torch::Tensor product = after.t().mm(after).cpu();
        EXPECT_LT((product - torch::eye(given.size(1), dtype)).abs().max().item<double>(), small) << by_tensors;
        const torch::Tensor outside = before - after.mm(after.t().mm(before));
        EXPECT_LT(outside.abs().max().item<double>(), small * 10) << "the span has shrunk; " << by_tensors;
      }
    }
  }
  for (const bool by_tensors : {false, true}) {
    const torch::Tensor shorter = torch::ones({4, 1});
    by_tensors ? orthogonalize_by_tensors(shorter, 2) : orthogonalize(shorter, 2, 1);
    EXPECT_NEAR(shorter[0][0].item<double>(), 1.0 / (2 + 2), 1e-6) << "a length of 2, and epsilon";
  }
}

}  // namespace
}  // namespace maniple::harness::ddp_power_sgd_test
