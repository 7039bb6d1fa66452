// Data-parallel training between hosts that are network namespaces, over TCP.
#include <fstream>
#include <sstream>

#include "comm/base/format.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_hosts_test {
namespace {

constexpr std::chrono::seconds kLimit(180);  // a process that loads LibTorch takes seconds to start on a busy machine

/// Bytes that eth0 of this rank's host has sent.
double sent_by_this_host() {
  std::ifstream in("/proc/self/net/dev");
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find("eth0:");
    if (colon == std::string::npos) continue;
    std::istringstream numbers(line.substr(colon + 5));
    double value = 0;
    for (int i = 0; i < 9; ++i) numbers >> value;
    return value;
  }
  return 0;
}

TEST(DdpHosts, GradientsEqualThoseFromTheWholeBatch) {
  run_ranks({.n = 3, .as = As::netns, .limit = kLimit, .hosts = 2}, [](Rank& r) {
    for (const Overlap overlap : {Overlap::automatic, Overlap::none, Overlap::inline_}) {
      for (const bool step_in_backward : {false, true}) {
        auto whole = std::make_shared<NetImpl>(), net = std::make_shared<NetImpl>();
        fill(*whole, 3);
        fill(*net, 3 + r.rank);
        DistributedDataParallel<NetImpl> ddp(
            net, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .group = r.world, .overlap = overlap});
        if (step_in_backward) {
          ddp.apply_optimizer_in_backward([](const std::string&, const torch::Tensor& parameter) {
            return std::make_shared<torch::optim::SGD>(std::vector<torch::Tensor>{parameter}, 0.1);
          });
        }
        torch::optim::SGD optimizer(net->parameters(), 0.1), reference(whole->parameters(), 0.1);
        const torch::Tensor batch = numbers({12, 8});
        for (int step = 0; step < 4; ++step) {
          whole->zero_grad();
          net->zero_grad();
          loss_of(whole->forward(batch)).backward();
          loss_of(ddp->forward(shard(batch, r.rank, r.size))).backward();
          expect_close(gradients_of(*net), gradients_of(*whole), 1e-5);
          if (!step_in_backward) optimizer.step();
          reference.step();
        }
        expect_same_everywhere(r, *net, false);
        if (overlap == Overlap::automatic) {
          EXPECT_EQ(ddp.statistics().overlap, "thread");
        }
      }
    }
  });
}

// Backward stands still between its two layers until the gradients of the second have crossed the link: they can only
// do so if the average runs beside it.
TEST(DdpHosts, BucketsTravelWhileBackwardGoesOn) {
  run_ranks({.n = 2, .as = As::netns, .limit = kLimit, .hosts = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>(65536);  // 1 MiB in the second layer, 2 in the first
    fill(*net, 3);
    DistributedDataParallel<NetImpl> ddp(net, {.first_bucket_mb = 0.9, .group = r.world});
    double crossed = 0;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const torch::Tensor hidden = net->fc1->forward(numbers({4, 8}, r.rank));
      const double before = sent_by_this_host();
      r.phase(format_text("counted {}", step));
      hidden.register_hook([&](const torch::Tensor&) {
        if (step == 0) return;  // the first backward lays the buckets out
        const double limit = now_s() + 30;
        do {
          crossed = sent_by_this_host() - before;
          std::this_thread::yield();
        } while (crossed < 0.9 * (1 << 20) && now_s() < limit);
      });
      loss_of(net->fc2->forward(torch::tanh(hidden))).backward();
      if (step > 0) {
        EXPECT_GE(crossed, 0.9 * (1 << 20)) << "nothing crossed the link during backward";
      }
    }
    EXPECT_EQ(ddp.statistics().overlap, "thread") << ddp.statistics().text();
    expect_same_everywhere(r, *net);
  });
}

// What hooks say they send is what the link carries.
TEST(DdpHosts, HooksSendAsManyBytesAsTheyReport) {
  run_ranks({.n = 2, .as = As::netns, .limit = kLimit, .hosts = 2}, [](Rank& r) {
    const PrescribedGradients::Shapes shapes = {{"weight", {1024, 512}}, {"bias", {1024}}};
    const auto measure = [&](const char* name, const CommHook& hook, const std::function<HookTraffic()>& traffic) {
      auto net = std::make_shared<PrescribedGradients>(shapes);
      DistributedDataParallel<PrescribedGradients> ddp(net, {.group = r.world});
      ddp.register_comm_hook(hook);
      net->loss(gradients_in(shapes, r.rank, 0)).backward();  // connections are open after this
      r.phase(format_text("{} before", name));
      const double before = sent_by_this_host();
      const HookTraffic said_before = traffic();
      r.phase(format_text("{} counted", name));
      net->loss(gradients_in(shapes, r.rank, 1)).backward();
      r.phase(format_text("{} after", name));
      const double carried = sent_by_this_host() - before;
      const HookTraffic said = traffic();
      r.phase(format_text("{} counted again", name));
      const auto bytes = static_cast<double>(said.sent_bytes - said_before.sent_bytes);
      EXPECT_GE(carried, bytes) << name;
      EXPECT_LE(carried, 1.08 * bytes + 20'000) << name;  // frames, headers, acknowledgements
      r.report(name, carried);
    };
    auto int8 = std::make_shared<Int8State>();
    measure("int8", int8_quantize_hook(int8), [&] { return int8->traffic(); });
    auto power =
        std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = 4, .start_powerSGD_iter = 0});
    measure("powerSGD", powerSGD_hook(power), [&] { return power->traffic(); });
    auto local = std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{.start_localSGD_iter = 2});
    measure("all_reduce", post_localSGD_hook(local), [&] { return local->traffic(); });
    EXPECT_NEAR(int8->traffic().compression_rate(), 3.94, 0.02);
    EXPECT_GT(power->traffic().compression_rate(), 60);
  });
}

TEST(DdpHosts, ARankWithoutBatchesIsNamed) {
  for (const bool leaves : {true, false}) {
    run_ranks({.n = 3, .as = As::netns, .limit = kLimit, .hosts = 3}, [leaves](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      std::optional<DistributedDataParallel<NetImpl>> ddp;
      ddp.emplace(net, DdpOptions{.group = r.world});
      const Caught caught = catch_error([&] {
        for (int step = 0; step < (r.rank == 1 ? 2 : 4); ++step) loss_of((*ddp)->forward(numbers({4, 8}))).backward();
        if (leaves && r.rank == 1) {
          ddp.reset();
          r.world.reset();
          return;
        }
        r.world->barrier();
      });
      if (leaves && r.rank == 1) return r.phase("the others have their error");
      EXPECT_TRUE(caught.is_one_of({ErrorKind::peer_lost, ErrorKind::mismatch})) << caught;
      if (r.rank != 1) {
        EXPECT_TRUE(contains(caught.text, "no more batches?")) << caught;
      }
      if (leaves) r.phase("the others have their error");
    });
  }
}

TEST(DdpHosts, UnevenBatchesAreShadowed) {
  run_ranks({.n = 4, .as = As::netns, .limit = kLimit, .hosts = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>(16, true);
    DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = kTiny, .group = r.world});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    with_uneven_inputs(ddp, [&] {
      for (int step = 0; step < (r.rank * 2) % 5; ++step) {  // 0, 2, 4, 1
        optimizer.zero_grad();
        loss_of(ddp->forward(numbers({4, 8}, r.rank + 7 * step))).backward();
        optimizer.step();
      }
    });
    expect_same_everywhere(r, *net, false);
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_hosts_test
