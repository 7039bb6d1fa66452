// Ranks that are not in a group: the verbs do nothing there, and whatever takes a group refuses it.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include <maniple/maniple.h>

namespace maniple::harness::dist_outside_test {
namespace {

// The same program on all ranks, as tutorials have it.
TEST(Outside, AGroupIsNeverTakenForTheWorld) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, [](Rank& r) {
    init_process_group(r.init_options());
    const auto pair = new_group({0, 1});
    const torch::Tensor x = torch::full({2}, r.rank == 0 ? 1.0f : r.rank == 1 ? 5.0f : 297.0f);
    all_reduce(x, ReduceOp::sum, {.group = pair});
    EXPECT_EQ(x[0].item<float>(), r.rank == 2 ? 297.0f : 6.0f);
    EXPECT_EQ(get_rank(pair), r.rank == 2 ? -1 : r.rank);
    EXPECT_EQ(get_world_size(pair), r.rank == 2 ? -1 : 2);
    EXPECT_EQ(get_backend(pair), "native");
    barrier();
    destroy_process_group();
  });
}

TEST(Outside, EveryVerbDoesNothing) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto group = r.world->new_group(std::vector<int>{0, 1});
    if (group->is_member()) {
      group->barrier();
      return;
    }
    // Not contiguous: what travels through a copy must not be written back either.
    const torch::Tensor x = torch::arange(12, torch::kFloat32).view({3, 4}).t();
    const torch::Tensor before = x.clone();
    const std::vector<torch::Tensor> list = {x, x, x};
    for (const bool async_op : {false, true}) {
      const DistOptions on{.group = group, .async_op = async_op};
      std::vector<Work> works = {broadcast(x, 0, on),
                                 reduce(x, 1, ReduceOp::sum, on),
                                 all_reduce(x, ReduceOp::sum, on),
                                 all_reduce_coalesced(list, ReduceOp::sum, on),
                                 gather(x, list, 0, on),
                                 all_gather(list, x, on),
                                 all_gather_into_tensor(x, x, on),
                                 scatter(x, list, 0, on),
                                 reduce_scatter(x, list, ReduceOp::sum, on),
                                 reduce_scatter_tensor(x, x, ReduceOp::sum, on),
                                 all_to_all(list, list, on),
                                 all_to_all_single(x, x, {}, {}, on),
                                 barrier(on),
                                 isend(x, 0, 0, on),
                                 irecv(x, 0, 0, on)};
      for (const Work& work : batch_isend_irecv({P2POp::isend(x, 0), P2POp::irecv(x, 1)}, on)) works.push_back(work);
      EXPECT_EQ(works.size(), 17u);
      for (const Work& work : works) {
        EXPECT_TRUE(work.done());
        work.wait();
      }
      monitored_barrier(on);
      send(x, 0, 0, on);
      EXPECT_EQ(recv(x, kAnyRank, 0, on), -1);
      EXPECT_EQ(broadcast_object("x", 0, on), "");
      EXPECT_TRUE(gather_object("x", 0, on).empty());
      EXPECT_TRUE(all_gather_object("x", on).empty());
      EXPECT_EQ(scatter_object({}, 0, on), "");
    }
    EXPECT_TRUE(torch::equal(x, before));
  });
}

TEST(Outside, WhateverTakesAGroupRefusesOne) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto group = r.world->new_group(std::vector<int>{0, 1});
    if (group->is_member()) {
      group->barrier();
      return;
    }
    const auto expect_refused = [&](const std::string& who, const std::function<void()>& use) {
      const Caught caught = catch_error(use);
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << who << ": " << caught;
      EXPECT_TRUE(contains(caught.text, who + ": rank 2 of the world is not in group " + group->name())) << who << ": " << caught;
    };
    const torch::nn::Linear net(2, 2);
    const torch::nn::BatchNorm1d norm(2);
    const auto parameters = net->parameters();
    expect_refused("init_process_group", [&] { init_process_group(group); });
    expect_refused("get_group_rank", [&] { get_group_rank(group, 0); });
    expect_refused("get_global_rank", [&] { get_global_rank(group, 0); });
    expect_refused("new_group", [&] { group->new_group(std::vector<int>{0}); });
    expect_refused("DistributedDataParallel", [&] {
      DistributedDataParallel<torch::nn::LinearImpl> ddp(net.ptr(), {.process_group = group});
    });
    expect_refused("convert_sync_batchnorm", [&] { convert_sync_batchnorm(norm, group); });
    expect_refused("SyncBatchNorm", [&] {
      nn::SyncBatchNorm layer(torch::nn::BatchNormOptions(2), group);
      layer->forward(torch::ones({4, 2}));
    });
    expect_refused("DistributedSampler", [&] { DistributedSampler sampler(10, {.group = group}); });
    expect_refused("Checkpoint", [&] { Checkpoint checkpoint({.folder = r.dir(), .group = group}); });
    expect_refused("Metrics::all_reduce", [&] { Metrics().all_reduce(group); });
    expect_refused("GracefulStop", [&] { GracefulStop().requested_anywhere(group); });
    expect_refused("EarlyStopping", [&] { EarlyStopping early({.group = group}); });
    expect_refused("clip_grad_norm_", [&] { clip_grad_norm_(parameters, 1.0, {.group = group}); });
    expect_refused("PeriodicModelAverager", [&] { PeriodicModelAverager averager({.process_group = group}); });
    expect_refused("PostLocalSGDState", [&] { PostLocalSGDState state({.subgroup = group}); });
  });
}

}  // namespace
}  // namespace maniple::harness::dist_outside_test
