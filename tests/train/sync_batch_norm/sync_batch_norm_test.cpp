// Synchronised batch norm against its definition: plain batch norm on the whole batch.
#include <sstream>

#include "comm/base/format.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::sync_batch_norm_test {
namespace {

using torch::Tensor;
using torch::nn::BatchNormOptions;
using Sizes = std::vector<std::int64_t>;

/// A rank's rows, as many as `rows` says.
Tensor rows_of(const Tensor& batch, const Sizes& rows, int rank) {
  std::int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += rows[static_cast<std::size_t>(r)];
  return batch.narrow(0, begin, rows[static_cast<std::size_t>(rank)]);
}

/// A module where the tests train.
template <class Holder>
Holder here(Holder module) {
  module->to(training_device());
  return module;
}

void expect_near(const Tensor& actual, const Tensor& expected, double tolerance, const char* what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!expected.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  if (expected.numel() == 0) return;
  const Tensor a = actual.detach().to(torch::kFloat64), b = expected.detach().to(torch::kFloat64);
  EXPECT_LE((a - b).abs().max().item<double>(), tolerance * std::max(1.0, b.abs().max().item<double>())) << what;
}

struct Case {
  std::string name;
  Sizes rows;           // of each rank
  Sizes more = {3, 2};  // dimensions after (N, C)
  torch::ScalarType dtype = torch::kFloat64;
  bool affine = true, track = true;
  c10::optional<double> momentum = 0.1;
  bool channels_last = false;
  double shift = 0;
};
class SyncBatchNormParity : public testing::TestWithParam<Case> {};

/// The LibTorch batch norm for this number of dimensions, converted.
struct AnyBatchNorm {
  explicit AnyBatchNorm(std::size_t dims, const BatchNormOptions& options) {
    if (dims <= 3) use(torch::nn::BatchNorm1d(options));
    if (dims == 4) use(torch::nn::BatchNorm2d(options));
    if (dims == 5) use(torch::nn::BatchNorm3d(options));
  }
  template <class Holder>
  void use(Holder holder) {
    module = holder.ptr();
    forward = [holder](const Tensor& x) mutable { return holder->forward(x); };
  }
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensor(const Tensor&)> forward;
};

void prepare(torch::nn::Module& module, torch::ScalarType dtype) {
  fill(module, 4);
  module.to(dtype);
}

TEST_P(SyncBatchNormParity, IsBatchNormOfTheWholeBatch) {
  const Case& given = GetParam();
  const std::int64_t channels = 5, total = std::accumulate(given.rows.begin(), given.rows.end(), std::int64_t{0});
  Sizes sizes{total, channels};
  sizes.insert(sizes.end(), given.more.begin(), given.more.end());
  auto options = BatchNormOptions(channels).eps(1e-4).momentum(given.momentum).affine(given.affine);
  options.track_running_stats(given.track);
  const bool can_convert = given.affine || given.track;
  const double allowed = (given.dtype == torch::kBFloat16  ? 2e-2
                          : given.dtype == torch::kFloat32 ? 3e-6
                                                           : 1e-12) *
                         (training_device().is_cpu() ? 1 : 4);  // GPUs add in another order

  run_ranks({.n = static_cast<int>(given.rows.size())}, [&](Rank& r) {
    AnyBatchNorm whole(sizes.size(), options), converted(sizes.size(), options);
    nn::SyncBatchNorm own(options, r.world);
    for (auto* module : {whole.module.get(), converted.module.get(), static_cast<torch::nn::Module*>(own.get())}) {
      prepare(*module, given.dtype);
    }
    std::vector<std::pair<std::function<Tensor(const Tensor&)>, torch::nn::Module*>> tried = {
        {[&](const Tensor& x) { return own->forward(x); }, own.get()}};
    if (can_convert) {
      EXPECT_EQ(convert_sync_batchnorm(converted.module, r.world), std::vector<std::string>{""});
      tried.emplace_back(converted.forward, converted.module.get());
    }
    for (int step = 0; step < 3; ++step) {
      Tensor batch = numbers(sizes, step).to(given.dtype) * 2 + given.shift;
      if (given.channels_last) batch = batch.contiguous(torch::MemoryFormat::ChannelsLast);
      const Tensor seed = numbers(sizes, step + 50).to(given.dtype);
      Tensor x = batch.clone().requires_grad_();
      whole.module->zero_grad();
      const Tensor expected = whole.forward(x);
      expected.backward(seed);
      for (auto& [forward, module] : tried) {
        Tensor part = rows_of(batch, given.rows, r.rank).clone().requires_grad_();
        module->zero_grad();
        const Tensor output = forward(part);
        output.backward(rows_of(seed, given.rows, r.rank));
        expect_near(output, rows_of(expected, given.rows, r.rank), allowed, "output");
        expect_near(part.grad(), rows_of(x.grad(), given.rows, r.rank), allowed, "gradient of the input");
        for (const auto& item : module->named_parameters()) {
          const Tensor sum = item.value().grad().clone();
          all_reduce(sum, ReduceOp::sum, {.group = r.world});
          expect_near(sum, whole.module->named_parameters()[item.key()].grad(), allowed, item.key().c_str());
        }
        ASSERT_EQ(module->named_buffers().size(), given.track ? 3u : 0u);
        for (const auto& item : module->named_buffers()) {
          expect_near(item.value(), whole.module->named_buffers()[item.key()], allowed, item.key().c_str());
        }
      }
    }
    // In evaluation nothing is exchanged: only one rank does it.
    if (r.rank != 0 || !given.track) return;
    whole.module->eval();
    for (auto& [forward, module] : tried) {
      module->eval();
      const Tensor x = numbers(sizes, 9).to(given.dtype);
      expect_near(forward(x), whole.forward(x), allowed * 3, "evaluation");
    }
  });
}

std::vector<Case> parity_cases() {
  std::vector<Case> all;
  const std::vector<Sizes> divisions = {{4}, {3, 3}, {2, 3, 1}, {2, 2, 2, 2}};
  for (const Sizes& rows : divisions) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
      all.push_back({format_text("{}Ranks{}", rows.size(), c10::toString(dtype)), rows, {3, 2}, dtype});
    }
    all.push_back({format_text("{}RanksPlainMean", rows.size()), rows, {4}, torch::kFloat64, true, true, c10::nullopt});
  }
  all.push_back({"BFloat16", {4, 2}, {3, 2}, torch::kBFloat16});
  all.push_back({"TwoDimensions", {4, 3}, {}});
  all.push_back({"ThreeDimensions", {1, 3}, {4}});
  all.push_back({"FiveDimensions", {2, 1}, {2, 3, 2}});
  all.push_back({"EmptyRank", {0, 3}});
  all.push_back({"EmptyRanksFloat32", {2, 0, 3, 0}, {3, 2}, torch::kFloat32});
  all.push_back({"NotAffine", {2, 3}, {3, 2}, torch::kFloat64, false});
  all.push_back({"NoRunningStatistics", {2, 3}, {3, 2}, torch::kFloat64, true, false});
  all.push_back({"Bare", {2, 3}, {3, 2}, torch::kFloat64, false, false});
  all.push_back({"ChannelsLast", {2, 3}, {3, 2}, torch::kFloat32, true, true, 0.1, true});
  all.push_back({"LargeMeanFloat64", {2, 3}, {3, 2}, torch::kFloat64, true, true, 0.1, false, 1e3});
  return all;
}
INSTANTIATE_TEST_SUITE_P(SyncBatchNorm, SyncBatchNormParity, testing::ValuesIn(parity_cases()),
                         [](const auto& one) { return one.param.name; });

// In float32 the sum of squares would lose everything: values near 10,000 whose variance is 1.
TEST(SyncBatchNorm, ALargeMeanCostsNoPrecision) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto norm = here(nn::SyncBatchNorm(BatchNormOptions(3).momentum(1), r.world));
    const Tensor batch = (torch::sin(torch::arange(600, torch::kFloat64)).view({200, 3}) * 1.5 + 10000)
                             .to(training_device(), torch::kFloat32);
    norm->forward(shard(batch, r.rank, 2));
    const Tensor exact = batch.to(torch::kFloat64).var(0).to(torch::kFloat32);
    EXPECT_TRUE(torch::allclose(norm->running_var, exact, 1e-3, 0)) << norm->running_var << exact;
  });
}

TEST(SyncBatchNorm, NonContiguousInputsAndGradients) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto whole = here(torch::nn::BatchNorm1d(4));
    auto norm = here(nn::SyncBatchNorm(4, r.world));
    const Tensor batch = numbers({4, 6}).to(torch::kFloat32).t();  // (6, 4)
    Tensor x = batch.detach().clone().requires_grad_(), part = shard(batch.detach(), r.rank, 2).requires_grad_();
    EXPECT_FALSE(part.is_contiguous());
    whole->forward(x).square().sum().backward();
    norm->forward(part).square().t().sum().backward();
    expect_near(part.grad(), shard(x.grad(), r.rank, 2), 1e-6, "gradient");
    const Tensor constant = norm->forward(part).sum(0, true);  // its gradient is expanded: strides of zero
    constant.sum().backward();
  });
}

// ---- With DistributedDataParallel ---------------------------------------------------------------------------------

/// Batch norm as a member, in a Sequential and in a list: all that people do.
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("block", block);
    register_module("list", list);
    register_module("head", head);
  }
  Tensor forward(Tensor x) {
    x = torch::relu(norm->forward(conv->forward(x)));
    x = block->forward(x).flatten(1);
    return head->forward(list[0]->as<torch::nn::BatchNorm1d>()->forward(x));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Sequential block{torch::nn::Conv2d(4, 3, 2), torch::nn::BatchNorm2d(3), torch::nn::Tanh()};
  torch::nn::ModuleList list{torch::nn::BatchNorm1d(12)};
  torch::nn::Linear head{12, 2};
};

struct DdpCase {
  int n;
  Overlap overlap;
};
class SyncBatchNormWithDdp : public testing::TestWithParam<DdpCase> {};

TEST_P(SyncBatchNormWithDdp, TrainsAsOneProcessOnTheWholeBatch) {
  const auto [n, overlap] = GetParam();
  run_ranks({.n = n}, [overlap = overlap](Rank& r) {
    auto whole = std::make_shared<ConvNetImpl>(), net = std::make_shared<ConvNetImpl>();
    for (auto* module : {whole.get(), net.get()}) {
      fill(*module, 3);
      module->to(torch::kFloat64);
    }
    EXPECT_EQ(convert_sync_batchnorm(net, r.world), (std::vector<std::string>{"norm", "block.1", "list.0"}));
    DistributedDataParallel<ConvNetImpl> ddp(net, {.bucket_cap_mb = kTiny, .group = r.world, .overlap = overlap});
    const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
    torch::optim::SGD whole_optimizer(whole->parameters(), options), optimizer(net->parameters(), options);
    for (int step = 0; step < 5; ++step) {
      const Tensor batch = numbers({12, 2, 5, 5}, step).to(torch::kFloat64);
      whole->zero_grad();
      net->zero_grad();
      loss_of(whole->forward(batch)).backward();
      loss_of(ddp->forward(shard(batch, r.rank, r.size))).backward();
      expect_close(gradients_of(*net), gradients_of(*whole), 1e-9);
      whole_optimizer.step();
      optimizer.step();
    }
    for (const auto& item : whole->named_buffers()) {
      expect_near(net->named_buffers()[item.key()], item.value(), 1e-9, item.key().c_str());
    }
    expect_same_everywhere(r, *net, false);
  });
}
INSTANTIATE_TEST_SUITE_P(SyncBatchNorm, SyncBatchNormWithDdp,
                         testing::Values(DdpCase{1, Overlap::none}, DdpCase{2, Overlap::none},
                                         DdpCase{3, Overlap::inline_}, DdpCase{4, Overlap::none},
                                         DdpCase{2, Overlap::inline_}, DdpCase{2, Overlap::thread}),
                         [](const auto& one) {
                           return format_text("{}RanksOverlap{}", one.param.n, static_cast<int>(one.param.overlap));
                         });

// ---- Conversion ---------------------------------------------------------------------------------------------------

TEST(SyncBatchNorm, OtherModulesAreUnchanged) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto mine = here(torch::nn::Sequential(torch::nn::BatchNorm1d(3)));
    auto other = here(torch::nn::Sequential(torch::nn::BatchNorm1d(3)));
    convert_sync_batchnorm(mine, r.world);
    const Tensor x = numbers({6, 3}, r.rank);
    EXPECT_TRUE(torch::allclose(other->forward(x), torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false)));
    mine->forward(x);
    const Tensor mean = mine->named_buffers()["0.running_mean"], root = mean.clone();
    broadcast(root, 0, {.group = r.world});
    EXPECT_TRUE(torch::equal(mean, root));
    if (r.rank == 0) {  // evaluation with the batch's own statistics is the rank's own matter, too
      auto untracked =
          here(torch::nn::Sequential(torch::nn::BatchNorm1d(BatchNormOptions(3).track_running_stats(false))));
      convert_sync_batchnorm(untracked, r.world);
      untracked->eval();
      EXPECT_TRUE(torch::allclose(untracked->forward(x), torch::batch_norm(x, {}, {}, {}, {}, true, 0, 1e-5, false)));
    }
  });
}

TEST(SyncBatchNorm, SynchronisesWithoutGradients) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto converted = here(torch::nn::BatchNorm1d(3)), whole = here(torch::nn::BatchNorm1d(3));
    convert_sync_batchnorm(converted, r.world);
    auto own = here(nn::SyncBatchNorm(3, r.world));
    const Tensor x = numbers({6, 3});
    const auto check = [&] {
      const Tensor expected = shard(whole->forward(x), r.rank, 2);
      expect_near(converted->forward(shard(x, r.rank, 2)), expected, 1e-6, "converted");
      expect_near(own->forward(shard(x, r.rank, 2)), expected, 1e-6, "own");
    };
    {
      const torch::NoGradGuard no_grad;
      check();
    }
    const c10::InferenceMode inference;
    check();
  });
}

TEST(SyncBatchNorm, CheckpointsFitBoth) {
  const auto options = BatchNormOptions(3);
  torch::nn::BatchNorm2d plain(options);
  nn::SyncBatchNorm sync(options);
  fill(*plain, 2);
  plain->running_mean.fill_(0.5);
  std::stringstream file;
  torch::save(plain, file);
  torch::load(sync, file);
  EXPECT_EQ(plain->named_parameters().keys(), sync->named_parameters().keys());
  EXPECT_EQ(plain->named_buffers().keys(), sync->named_buffers().keys());
  EXPECT_TRUE(torch::equal(plain->weight, sync->weight));
  EXPECT_TRUE(torch::equal(plain->running_mean, sync->running_mean));
  std::ostringstream text;
  text << sync;
  EXPECT_TRUE(contains(text.str(), "maniple::nn::SyncBatchNorm(3")) << text.str();
}

/// Looks like batch norm, but who knows.
struct OwnNormImpl : torch::nn::Module {
  OwnNormImpl() {
    register_buffer("running_mean", torch::zeros({2}));
    register_buffer("running_var", torch::ones({2}));
  }
  Tensor forward(Tensor x) { return x; }
};

TEST(SyncBatchNorm, ModulesThatCannotBeConvertedAreNamed) {
  const auto text = [](const auto& module) {
    const Caught caught = catch_error([&] { convert_sync_batchnorm(module); });
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    return caught.text;
  };
  torch::nn::Sequential bare(torch::nn::BatchNorm1d(2),
                             torch::nn::BatchNorm1d(BatchNormOptions(2).affine(false).track_running_stats(false)));
  EXPECT_TRUE(contains(text(bare), "1 has neither affine parameters nor running statistics"));
  // Nothing was changed: the first one, which could be, is not.
  EXPECT_NO_THROW(here(bare)->forward(numbers({4, 2})));
  torch::nn::Sequential strange(torch::nn::Linear(2, 2), std::make_shared<OwnNormImpl>());
  EXPECT_TRUE(contains(text(strange), "1 is of the class") && contains(text(strange), "OwnNorm"));
  EXPECT_TRUE(contains(text(std::shared_ptr<torch::nn::Module>()), "null"));
  torch::nn::Sequential fine(torch::nn::InstanceNorm1d(torch::nn::InstanceNorm1dOptions(2).track_running_stats(true)));
  EXPECT_TRUE(convert_sync_batchnorm(fine).empty());
}

// ---- Errors -------------------------------------------------------------------------------------------------------

TEST(SyncBatchNorm, WrongInputs) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto norm = here(nn::SyncBatchNorm(3, r.world));
    const auto text = [&](const Tensor& x) {
      const Caught caught = catch_error([&] { norm->forward(x); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      return caught.text;
    };
    EXPECT_TRUE(contains(text(numbers({3})), "two dimensions or more"));
    EXPECT_TRUE(contains(text(numbers({2, 4})), "expected 3 channels"));
    EXPECT_TRUE(
        contains(text(numbers({r.rank, 3})), "Expected more than 1 value per channel"));  // one row on rank 1 alone
    norm->forward(numbers({1, 3}, r.rank));                                               // one each is two
    EXPECT_EQ(norm->forward(torch::zeros({0, 3}, training_device())).size(0), 0);         // none at all
    Tensor x = numbers({4, 3}).requires_grad_();
    const Caught twice = catch_error(
        [&] { torch::autograd::grad({norm->forward(x).square().sum()}, {x}, {}, true, /*create_graph=*/true); });
    EXPECT_TRUE(twice.is(ErrorKind::unsupported)) << twice;
    EXPECT_EQ(norm->num_batches_tracked.item<int>(), 4);
  });
}

TEST(SyncBatchNorm, AGroupOfOneIsPlain) {
  run_ranks({.n = 1}, [](Rank& r) {
    auto norm = here(nn::SyncBatchNorm(3, r.world));
    const Caught caught = catch_error([&] { norm->forward(numbers({1, 3})); });
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, "got input size [1, 3]")) << caught;
    EXPECT_TRUE(norm->forward(numbers({2, 3}).requires_grad_()).requires_grad());
  });
}

TEST(SyncBatchNorm, GroupsThatAreMissing) {
  auto norm = here(nn::SyncBatchNorm(3));
  Caught caught = catch_error([&] { norm->forward(numbers({4, 3})); });
  EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
  norm->eval();
  EXPECT_NO_THROW(norm->forward(numbers({4, 3})));
  if (!training_device().is_cpu()) return;  // ranks are processes there
  auto converted = here(torch::nn::BatchNorm1d(3));
  run_ranks({.n = 1}, [&](Rank& r) { convert_sync_batchnorm(converted, r.world); });
  caught = catch_error([&] { converted->forward(numbers({4, 3})); });
  EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, "does not exist any more")) << caught;
}

TEST(SyncBatchNorm, RanksThatDisagreeThrow) {
  // NCCL does not compare calls: the ranks' calls are requested after the time-out.
  run_ranks({.n = 2, .timeout = std::chrono::seconds(10)}, [](Rank& r) {
    auto norm = here(nn::SyncBatchNorm(3 + r.rank, r.world));
    const Caught caught = catch_error([&] {
      norm->forward(numbers({4, 3 + r.rank}));
      // On a GPU it was only enqueued: a later call throws.
      for (int i = 0; i < 1000 && !training_device().is_cpu(); ++i) r.world->barrier();
    });
    EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
  });
}

}  // namespace
}  // namespace maniple::harness::sync_batch_norm_test
