// Groups: ranks that are not in one, ranks whose number in it differs from that in the world; what a process knows of
// itself.
#include <cstdlib>
#include <fstream>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include <maniple/maniple.h>

namespace maniple::harness::dist_groups_test {
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

TEST(Outside, EveryOperationDoesNothing) {
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
      EXPECT_TRUE(contains(caught.text, who + ": rank 2 of the world is not in group " + group->name()))
          << who << ": " << caught;
    };
    const torch::nn::Linear net(2, 2);
    const torch::nn::BatchNorm1d norm(2);
    const auto parameters = net->parameters();
    expect_refused("init_process_group", [&] { init_process_group(group); });
    expect_refused("get_group_rank", [&] { get_group_rank(group, 0); });
    expect_refused("get_global_rank", [&] { get_global_rank(group, 0); });
    expect_refused("new_group", [&] { group->new_group(std::vector<int>{0}); });
    expect_refused("DistributedDataParallel",
                   [&] { DistributedDataParallel<torch::nn::LinearImpl> ddp(net.ptr(), {.group = group}); });
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
    expect_refused("PeriodicModelAverager", [&] { PeriodicModelAverager averager({.group = group}); });
    expect_refused("PostLocalSGDState", [&] { PostLocalSGDState state({.subgroup = group}); });
  });
}

// ---- Groups whose ranks differ from the world's ---------------------------------------------------------------------

/// A group of global ranks 3, 1, 2 of four, in this order; false on rank 0.
bool make_group(Rank& r, std::shared_ptr<ProcessGroup>& group) {
  group = r.world->new_group(std::vector<int>{3, 1, 2});
  return group->is_member();
}

TEST(GlobalRanks, RootsOfCollectives) {
  run_ranks({.n = 4}, [](Rank& r) {
    std::shared_ptr<ProcessGroup> group;
    if (!make_group(r, group)) return;
    const auto mine = [&] { return torch::full({2}, static_cast<float>(r.rank)); };
    for (const bool async_op : {false, true}) {
      const DistOptions on{.group = group, .async_op = async_op};
      const torch::Tensor x = mine(), y = mine(), sum = mine(), part = torch::zeros({2});
      broadcast(x, 2, on).wait();
      EXPECT_EQ(x[0].item<float>(), 2) << "global rank 2";
      broadcast(y, GroupRank{0}, on).wait();
      EXPECT_EQ(y[0].item<float>(), 3) << "rank 0 of the group is global rank 3";
      reduce(sum, 1, ReduceOp::sum, on).wait();
      EXPECT_EQ(sum[0].item<float>(), r.rank == 1 ? 6 : r.rank);
      std::vector<torch::Tensor> list;
      if (r.rank == 2) list = {torch::zeros({2}), torch::zeros({2}), torch::zeros({2})};
      gather(mine(), list, 2, on).wait();
      for (std::size_t i = 0; i < list.size(); ++i) {
        EXPECT_EQ(list[i][0].item<float>(), get_global_rank(group, static_cast<int>(i))) << "in the order of the group";
      }
      scatter(part, list, GroupRank{2}, on).wait();
      EXPECT_EQ(part[0].item<float>(), r.rank);
    }
    const DistOptions on{.group = group};
    EXPECT_EQ(broadcast_object(std::to_string(r.rank), 3, on), "3");
    EXPECT_EQ(broadcast_object(std::to_string(r.rank), GroupRank{1}, on), "1");
    EXPECT_EQ(gather_object("x", 3, on).size(), r.rank == 3 ? 3u : 0u);
    const std::vector<std::string> objects =
        r.rank == 1 ? std::vector<std::string>{"for 3", "for 1", "for 2"} : std::vector<std::string>();
    EXPECT_EQ(scatter_object(objects, 1, on), "for " + std::to_string(r.rank));
  });
}

TEST(GlobalRanks, Peers) {
  run_ranks({.n = 4}, [](Rank& r) {
    std::shared_ptr<ProcessGroup> group;
    if (!make_group(r, group)) return;
    const DistOptions on{.group = group};
    const torch::Tensor x = torch::full({2}, static_cast<float>(r.rank)), got = torch::zeros({2});
    if (r.rank == 1) {
      send(x, 2, 0, on);
      isend(x, GroupRank{2}, 1, on).wait();  // global rank 2 again
    } else if (r.rank == 2) {
      EXPECT_EQ(recv(got, 1, 0, on), 1);
      EXPECT_EQ(got[0].item<float>(), 1);
      irecv(got, GroupRank{1}, 1, on).wait();
    }
    group->barrier();
    if (r.rank == 3) send(x, 1, 2, on);
    if (r.rank == 1) {
      EXPECT_EQ(recv(got, kAnyRank, 2, on), 3) << "the sender's global rank";
    }
    const int next = r.rank == 3 ? 1 : r.rank + 1, previous = r.rank == 1 ? 3 : r.rank - 1;
    for (const Work& work : batch_isend_irecv({P2POp::isend(x, next), P2POp::irecv(got, previous)}, on)) work.wait();
    EXPECT_EQ(got[0].item<float>(), previous);
  });
}

TEST(GlobalRanks, OneThatIsNotInTheGroup) {
  run_ranks({.n = 4}, [](Rank& r) {
    std::shared_ptr<ProcessGroup> group;
    if (!make_group(r, group)) return;
    const DistOptions on{.group = group};
    const torch::Tensor x = torch::ones({2});
    const auto expect_refused = [&](const std::string& who, const std::function<void()>& use) {
      const Caught caught = catch_error(use);
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << who << ": " << caught;
      EXPECT_TRUE(contains(
          caught.text, who + " is global rank 0, which is not in group " + group->name() + " (global ranks 3, 1, 2)"))
          << caught;
      EXPECT_TRUE(contains(caught.text, "GroupRank{0}")) << caught;
    };
    expect_refused("broadcast: src", [&] { broadcast(x, 0, on); });
    expect_refused("reduce: dst", [&] { reduce(x, 0, ReduceOp::sum, on); });
    expect_refused("gather: dst", [&] { gather(x, {}, 0, on); });
    expect_refused("scatter: src", [&] { scatter(x, {}, 0, on); });
    expect_refused("send: dst", [&] { send(x, 0, 0, on); });
    expect_refused("recv: src", [&] { recv(x, 0, 0, on); });
    expect_refused("isend: dst", [&] { isend(x, 0, 0, on); });
    expect_refused("irecv: src", [&] { irecv(x, 0, 0, on); });
    expect_refused("batch_isend_irecv: peer", [&] { batch_isend_irecv({P2POp::isend(x, 0)}, on); });
    expect_refused("broadcast_object: src", [&] { broadcast_object("", 0, on); });
    expect_refused("gather_object: dst", [&] { gather_object("", 0, on); });
    expect_refused("scatter_object: src", [&] { scatter_object({}, 0, on); });
    for (const int rank : {-2, 3, 100}) {
      const Caught caught = catch_error([&] { broadcast(x, GroupRank{rank}, on); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    }
    const Caught both = catch_error([&] {
      if (r.rank == 1) scatter(x, {x, x, x}, 3, on);
    });
    if (r.rank == 1) {
      EXPECT_TRUE(contains(both.text, "only src (rank 0 of the group, global rank 3) passes a scatter_list")) << both;
    }
    group->barrier();
  });
}

// ---- What a process knows of itself ---------------------------------------------------------------------------------

TEST(ThisProcess, RanksAndTheMainProcess) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, [](Rank& r) {
    for (const char* name : {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"}) ::unsetenv(name);
    EXPECT_TRUE(is_main_process()) << "without a group, and without RANK";
    EXPECT_EQ(main_process_first([] { return 7; }), 7) << "without a group it is just called";
    ::setenv("RANK", "2", 1);
    EXPECT_FALSE(is_main_process());
    ::unsetenv("RANK");
    init_process_group(r.init_options());
    EXPECT_EQ(get_local_rank(), r.rank);
    EXPECT_EQ(get_node_rank(), 0);
    ::setenv("LOCAL_RANK", "5", 1);
    ::setenv("GROUP_RANK", "6", 1);
    EXPECT_EQ(get_local_rank(), 5);
    EXPECT_EQ(get_node_rank(), 6);
    ::setenv("NODE_RANK", "7", 1);
    EXPECT_EQ(get_node_rank(), 7);
    ::setenv("LOCAL_RANK", "five", 1);
    EXPECT_THROW(get_local_rank(), InvalidArgument);
    EXPECT_EQ(is_main_process(), r.rank == 0);

    testing::internal::CaptureStdout();
    print_once("rank ", r.rank, " of ", get_world_size());
    EXPECT_EQ(testing::internal::GetCapturedStdout(), r.rank == 0 ? "rank 0 of 3\n" : "");
    barrier();
    destroy_process_group();
  });
}

TEST(ThisProcess, TheMainProcessFirst) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, [](Rank& r) {
    init_process_group(r.init_options());
    const std::string path = r.dir() + "/made-by-rank-0";
    const bool found = main_process_first([&] {
      const bool there = std::ifstream(path).good();
      std::ofstream(path) << "x";
      return there;
    });
    EXPECT_EQ(found, r.rank != 0);

    int calls = 0;
    const Caught failed = catch_error([&] {
      main_process_first([&] {
        ++calls;
        throw Unsupported("no room on the disk");
      });
    });
    EXPECT_TRUE(contains(failed.text, "no room on the disk")) << failed;
    EXPECT_TRUE(failed.is(r.rank == 0 ? ErrorKind::unsupported : ErrorKind::aborted)) << failed;
    EXPECT_EQ(calls, r.rank == 0 ? 1 : 0) << "the others do not call it";
    barrier();  // the group is as good as before

    const Caught own = catch_error([&] {
      main_process_first([&] {
        if (r.rank == 1) throw Unsupported("my own");
      });
    });
    EXPECT_EQ(contains(own.text, "my own"), r.rank == 1) << own;
    barrier();
    destroy_process_group();
  });
}

}  // namespace
}  // namespace maniple::harness::dist_groups_test
