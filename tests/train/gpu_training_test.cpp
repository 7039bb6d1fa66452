// Training on a GPU: what must not wait for it does not, mixed precision and layouts train as one process, a step is
// captured into a graph, batches are copied ahead. Needs a GPU; compiled only with a LibTorch that has CUDA.
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include "train/progress_line.h"
#include "train/tensor/device.h"
#include "train/tensor/torch_compat.h"
#include <maniple/maniple.h>

namespace maniple::harness::gpu_training_test {
namespace {

using torch::Tensor;

/// While it lives, an operation of LibTorch that waits for the GPU throws.
struct NoWaiting {
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

TEST(NoWaiting, IsNoticed) {
  const Tensor one = torch::ones({}, training_device());
  const NoWaiting no_waiting;
  EXPECT_ANY_THROW(one.item<double>());
}

// ---- Hooks, batch norm, clipping, metrics ---------------------------------------------------------------------------

const PrescribedGradients::Shapes kShapes = {{"matrix", {40, 30}}, {"image", {8, 4, 3, 3}}, {"bias", {20}}};

TEST(GpuHooks, WaitForNothing) {
  std::vector<std::pair<std::string, CommHook (*)()>> hooks;
  for (const NamedCommHook& hook : comm_hooks()) hooks.emplace_back(hook.name, hook.make);
  hooks.emplace_back("int8 with feedback", [] {
    return int8_quantize_hook(std::make_shared<Int8State>(Int8Options{.use_error_feedback = true}));
  });
  hooks.emplace_back("powerSGD from the first step", [] {
    return powerSGD_hook(std::make_shared<PowerSGDState>(
        PowerSGDOptions{.matrix_approximation_rank = 2, .start_powerSGD_iter = 0, .min_compression_rate = 1}));
  });
  hooks.emplace_back("powerSGD without warm start", [] {
    return powerSGD_hook(std::make_shared<PowerSGDState>(
        PowerSGDOptions{.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = false}));
  });
  run_ranks({.n = 2}, [&](Rank& r) {
    for (const auto& [name, make] : hooks) {
      auto net = std::make_shared<PrescribedGradients>(kShapes);
      DistributedDataParallel<PrescribedGradients> ddp(net, {.group = r.world});
      ddp.register_comm_hook(make());
      Gradients given = gradients_in(kShapes, r.rank, 1);
      for (auto& [parameter, gradient] : given) gradient = gradient.to(training_device());
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        const Tensor loss = net->loss(given);
        if (step < 2) {
          loss.backward();
        } else {
          const NoWaiting no_waiting;
          EXPECT_NO_THROW(loss.backward()) << name;
        }
      }
      const Gradients mean = mean_of({gradients_in(kShapes, 0, 1), gradients_in(kShapes, 1, 1)});
      for (const auto& [parameter, gradient] : gradients_of(*net)) {
        EXPECT_TRUE(torch::isfinite(gradient).all().item<bool>()) << name << ", " << parameter;
      }
      if (name.find("powerSGD ") == std::string::npos) expect_close(gradients_of(*net), mean, 2e-2);
      expect_same_everywhere(r, *net);
    }
  });
}

TEST(GpuSyncBatchNorm, WaitsForNothingInAllLayoutsAndTypes) {
  run_ranks({.n = 2}, [](Rank& r) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat16, torch::kBFloat16}) {
      for (const bool channels_last : {false, true}) {
        const auto format = channels_last ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
        torch::nn::BatchNorm2d whole(6);
        nn::SyncBatchNorm norm(6, r.world);
        fill(*whole, 2);
        fill(*norm, 2);
        Tensor all = numbers({8, 6, 5, 3}, 1).requires_grad_();
        const Tensor seed = numbers({8, 6, 5, 3}, 2);
        const Tensor expected = whole->forward(all);
        expected.backward(seed);
        Tensor part = shard(all.detach(), r.rank, 2).to(dtype).contiguous(format).requires_grad_();
        const Tensor part_seed = shard(seed, r.rank, 2).to(dtype).contiguous(format);
        Tensor output;
        {
          const NoWaiting no_waiting;
          output = norm->forward(part);
          output.backward(part_seed);
        }
        EXPECT_EQ(output.scalar_type(), dtype);
        EXPECT_EQ(output.suggest_memory_format(), format);
        const double allowed = dtype == torch::kFloat32 ? 2e-5 : dtype == torch::kFloat16 ? 1e-2 : 6e-2;
        const auto expect_near = [&](const Tensor& a, const Tensor& b, const char* what) {
          EXPECT_LT((a.to(torch::kFloat32) - b).abs().max().item<double>(), allowed)
              << what << " " << c10::toString(dtype) << " " << channels_last;
        };
        expect_near(output, shard(expected, r.rank, 2), "output");
        expect_near(part.grad(), shard(all.grad(), r.rank, 2), "gradient of the input");
        expect_near(norm->running_mean, whole->running_mean, "running mean");
        expect_near(norm->running_var, whole->running_var, "running variance");
      }
    }
  });
}

std::vector<Tensor> with_gradients(const torch::Device& device) {
  std::vector<Tensor> parameters;
  int seed = 1;
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kFloat32, torch::kFloat64, torch::kFloat16}) {
    Tensor parameter = torch::zeros({30, 7}, torch::TensorOptions(device).dtype(dtype)).requires_grad_();
    parameter.mutable_grad() = numbers({30, 7}, seed++).to(device, dtype);
    parameters.push_back(parameter);
  }
  parameters.push_back(torch::zeros({0}, torch::TensorOptions(device)).requires_grad_());
  parameters.back().mutable_grad() = torch::zeros({0}, torch::TensorOptions(device));
  return parameters;
}

TEST(GpuClipGrad, WaitsForNothingAndEqualsTheCpu) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {1.0, 2.0, 3.0, infinity}) {
    const auto here = with_gradients(training_device()), there = with_gradients(torch::kCPU);
    Tensor norm;
    {
      const NoWaiting no_waiting;
      norm = clip_grad_norm_(here, 0.7, {.norm_type = p});
      clip_grad_value_(here, 0.05);
    }
    const Tensor expected = clip_grad_norm_(there, 0.7, {.norm_type = p});
    clip_grad_value_(there, 0.05);
    EXPECT_NEAR(norm.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>()) << p;
    for (std::size_t i = 0; i < here.size(); ++i) {
      const Tensor a = here[i].grad().cpu().to(torch::kFloat64), b = there[i].grad().to(torch::kFloat64);
      EXPECT_TRUE(torch::allclose(a, b, 1e-2, 1e-6)) << p << ", gradient " << i;
    }
  }
  auto wrong = with_gradients(training_device());
  wrong[2].mutable_grad()[3][4] = std::nan("");
  const Caught caught = catch_error([&] { clip_grad_norm_(wrong, 1, {.error_if_nonfinite = true}); });
  EXPECT_TRUE(contains(caught.text, "parameter 2 of shape [30, 7]")) << caught;
}

TEST(GpuClipGrad, OverRanks) {
  run_ranks({.n = 2}, [](Rank& r) {
    const Tensor parameter = torch::zeros({3}, training_device()).requires_grad_();
    parameter.mutable_grad() = torch::full({3}, r.rank + 1.0, training_device());
    for (const double p : {2.0, std::numeric_limits<double>::infinity()}) {
      Tensor norm;
      {
        const NoWaiting no_waiting;
        norm = clip_grad_norm_(parameter, 100, {.norm_type = p, .group = r.world});
      }
      EXPECT_NEAR(norm.item<double>(), p == 2 ? std::sqrt(3 * 1.0 + 3 * 4.0) : 2, 1e-6);
    }
  });
}

TEST(GpuMetrics, AreReadOnce) {
  Metrics metrics;
  const Tensor scores = numbers({8, 5}), target = scores.argmax(1);
  const std::vector<Tensor> values = {numbers({1}, 0), numbers({1}, 1), numbers({1}, 2)};
  {
    const NoWaiting no_waiting;
    for (const Tensor& value : values) {
      metrics.add("loss", value, 2);
      metrics.add_max("largest", value);
      metrics.add_accuracy("accuracy", scores, target);
    }
  }
  const MetricRow row = metrics.all_reduce();
  EXPECT_NEAR(row["accuracy"], 1, 1e-9);
  EXPECT_NEAR(row["loss"], (std::sin(0.0) + std::sin(1.0) + std::sin(2.0)) / 3, 1e-6);
  EXPECT_NEAR(row["largest"], std::sin(2.0), 1e-6);
}

// ---- Batches ahead, random numbers, memory, options -----------------------------------------------------------------

TEST(GpuPrefetch, BatchesAreThereWhenTheStreamGetsToThem) {
  using Example = torch::data::Example<>;
  std::vector<Example> batches;
  for (int i = 0; i < 12; ++i) {
    batches.emplace_back(torch::full({1 << 20}, i, torch::kFloat32), torch::full({7, 3}, i, torch::kInt64).t());
  }
  const Tensor busy = torch::ones({2048, 2048}, training_device());
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  std::vector<Tensor> sums;
  int seen = 0;
  for (auto& batch : prefetch_to(training_device(), batches)) {
    EXPECT_EQ(batch.data.device(), training_device());
    EXPECT_EQ(batch.target.strides(), batches[static_cast<std::size_t>(seen)].target.strides());
    for (int i = 0; i < 5; ++i) busy.mm(busy);  // the host is far ahead of the GPU
    sums.push_back(batch.data.sum(torch::kFloat64) + batch.target.sum());
    ++seen;
  }
  EXPECT_EQ(seen, 12);
  for (int i = 0; i < seen; ++i) {
    EXPECT_EQ(sums[static_cast<std::size_t>(i)].item<double>(), i * ((1 << 20) + 21.0)) << i;
  }
  EXPECT_EQ(batches[3].data.device(), torch::Device(torch::kCPU)) << "the range keeps its own";
}

TEST(GpuRandom, SeedsAndCheckpoints) {
  run_ranks({.n = 1}, [](Rank& r) {
    const auto draw = [] { return torch::rand({100}, training_device()); };
    seed_all(5);
    const Tensor first = draw();
    seed_all(5);
    EXPECT_TRUE(torch::equal(draw(), first));
    seed_all(5, 1);
    EXPECT_FALSE(torch::equal(draw(), first)) << "another stream";

    Tensor value = torch::full({3}, 4.0);
    Checkpoint checkpoint({.folder = r.dir() + "/checkpoints", .background = false, .group = r.world});
    checkpoint.add("value", value);
    checkpoint.save(1);
    const Tensor after = draw();
    value.zero_();
    EXPECT_EQ(checkpoint.load({.map_location = training_device()}), 1);
    EXPECT_TRUE(torch::equal(draw(), after)) << "the generator goes on where it was saved";
    EXPECT_EQ(value.device(), training_device());
    EXPECT_EQ(value.sum().item<double>(), 12);
  });
}

TEST(GpuProgress, ShowsTheMemory) {
  const Tensor some = torch::zeros({1 << 28}, training_device());  // 1 GiB
  const PeakMemory memory = peak_memory();
  EXPECT_GE(memory.allocated, std::size_t{1} << 30);
  EXPECT_GE(memory.reserved, memory.allocated);
  EXPECT_TRUE(contains(memory_text(memory.allocated, memory.reserved), "GPU 1."));
}

TEST(GpuDdp, DeviceIdsSayWhereTheModuleIs) {
  run_ranks({.n = 1}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    fill(*net, 1);
    EXPECT_NO_THROW(DistributedDataParallel<NetImpl>(net, {.group = r.world, .device_ids = {0}}));
    const Caught wrong =
        catch_error([&] { DistributedDataParallel<NetImpl>(net, {.group = r.world, .device_ids = {1}}); });
    EXPECT_TRUE(contains(wrong.text, "device_ids is {1}, but parameter fc1.weight is on cuda:0")) << wrong;
  });
}

// ---- Mixed precision ------------------------------------------------------------------------------------------------

struct Autocast {
  explicit Autocast(torch::ScalarType dtype) {
    set_autocast_dtype(torch::kCUDA, dtype);
    enable(true);
  }
  ~Autocast() {
    enable(false);
    at::autocast::clear_cache();
  }
  static void enable(bool enabled) {
#if MANIPLE_TORCH_AT_LEAST(2, 4)
    at::autocast::set_autocast_enabled(at::kCUDA, enabled);
#else
    at::autocast::set_enabled(enabled);
#endif
  }
};

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    register_module("one", one);
    register_module("two", two);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = torch::relu(two->forward(torch::relu(one->forward(x))));
    return head->forward(y.mean(torch::IntArrayRef{2, 3}));
  }
  torch::nn::Conv2d one{torch::nn::Conv2dOptions(3, 16, 3).padding(1)}, two{torch::nn::Conv2dOptions(16, 32, 3)};
  torch::nn::Linear head{32, 5};
};

TEST(GpuDdp, AutocastAndChannelsLastTrainAsOneProcess) {
  for (const auto dtype : {torch::kBFloat16, torch::kFloat16}) {
    run_ranks({.n = 2}, [dtype](Rank& r) {
      const auto make = [] {
        auto net = std::make_shared<ConvNetImpl>();
        fill(*net, 3);
        for (Tensor& parameter : net->parameters()) {
          if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(torch::MemoryFormat::ChannelsLast));
        }
        return net;
      };
      auto whole = make(), net = make();
      DistributedDataParallel<ConvNetImpl> ddp(net, {.bucket_cap_mb = kTiny, .group = r.world});
      for (int step = 0; step < 3; ++step) {
        const Tensor batch = numbers({8, 3, 12, 12}, step).contiguous(torch::MemoryFormat::ChannelsLast);
        const auto loss = [&](const auto& forward, const Tensor& x) {
          const Autocast autocast(dtype);
          const Tensor output = forward(x);
          EXPECT_EQ(output.scalar_type(), dtype);
          return loss_of(output.to(torch::kFloat32));
        };
        whole->zero_grad();
        net->zero_grad();
        loss([&](const Tensor& x) { return whole->forward(x); }, batch).backward();
        loss([&](const Tensor& x) { return ddp->forward(x); }, shard(batch, r.rank, r.size)).backward();
        const Gradients expected = gradients_of(*whole);
        for (const auto& [name, gradient] : gradients_of(*net)) {
          const double largest = expected.at(name).abs().max().item<double>();
          EXPECT_LE((gradient - expected.at(name)).abs().max().item<double>(), 3e-2 * largest) << name;
        }
        EXPECT_EQ(net->two->weight.grad().strides(), net->two->weight.strides());
        EXPECT_EQ(net->two->weight.grad().scalar_type(), torch::kFloat32);
        expect_same_everywhere(r, *net);
      }
    });
  }
}

// ---- A step as a graph ----------------------------------------------------------------------------------------------

class GpuGraph : public testing::TestWithParam<int> {};

TEST_P(GpuGraph, ReplaysTrainAsPlainSteps) {
  constexpr int kBefore = 4, kReplays = 5;
  run_ranks({.n = GetParam()}, [](Rank& r) {
    const char* doing = "plain steps";
    try {
      // All of it on one stream that is not the default one, DDP's construction included: autograd remembers it.
      const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
      const c10::cuda::CUDAStreamGuard guard(stream);
      const Tensor x = numbers({8, 8}, 0);
      struct Training {
        explicit Training(Rank& rank) : net(std::make_shared<NetImpl>(32, true)) {
          fill(*net, 3);
          ddp.emplace(net, DdpOptions{.group = rank.world});
          optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
        }
        void step(const Tensor& batch) {
          zero_grad(*optimizer, true);
          loss_of(ddp->forward(batch)).backward();
          optimizer->step();
        }
        std::shared_ptr<NetImpl> net;
        std::optional<DistributedDataParallel<NetImpl>> ddp;
        std::optional<torch::optim::SGD> optimizer;
      };
      const auto load = [&](int step) { x.copy_(numbers({8, 8}, 10 * step + r.rank)); };
      Training plain(r), captured(r);
      for (int step = 0; step < kBefore + kReplays; ++step) {
        load(step);
        plain.step(x);
      }
      for (int step = 0; step < kBefore; ++step) {
        load(step);
        captured.step(x);
      }
      stream.synchronize();
      r.world->barrier();
      doing = "beginning to capture";
      at::cuda::CUDAGraph graph;
#if MANIPLE_TORCH_AT_LEAST(2, 1)
      graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
#else
      graph.capture_begin();
#endif
      doing = "capturing a step";
      captured.step(x);
      doing = "ending the capture";
      graph.capture_end();
      doing = "replaying";
      for (int step = kBefore; step < kBefore + kReplays; ++step) {
        load(step);
        graph.replay();
      }
      stream.synchronize();
      doing = "comparing";
      for (const auto& item : plain.net->named_parameters()) {
        const Tensor own = captured.net->named_parameters()[item.key()];
        EXPECT_TRUE(torch::allclose(own, item.value(), 1e-5, 1e-6))
            << item.key() << " differs by " << (own - item.value()).abs().max().item<double>();
      }
      for (const auto& item : plain.net->named_buffers()) {
        const Tensor own = captured.net->named_buffers()[item.key()];
        EXPECT_TRUE(torch::allclose(own, item.value(), 1e-5, 1e-6)) << item.key();
      }
      expect_same_everywhere(r, *captured.net, false);
      r.world->barrier();
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string("while ") + doing + ": " + error.what());
    }
  });
}
// NCCL's ranks need a GPU each for it.
INSTANTIATE_TEST_SUITE_P(Ranks, GpuGraph, testing::ValuesIn([] {
                           return chosen_backend() == "nccl" ? std::vector{1} : std::vector{1, 2};
                         }()));

}  // namespace
}  // namespace maniple::harness::gpu_training_test
