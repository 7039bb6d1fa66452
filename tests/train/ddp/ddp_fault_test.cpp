// What goes wrong in data-parallel training, and which error each rank gets.
#include <csignal>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/models.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_fault_test {
namespace {

using namespace maniple::testing_models;

constexpr std::chrono::seconds kLimit(180);  // a process that loads LibTorch takes seconds to start on a busy machine

TEST(DdpFault, ARankKilledInBackwardIsNamedByAllOthers) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    run_ranks({.n = 3, .as = As::processes, .limit = kLimit, .fault = kill_at(1, 4)}, [overlap](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = 1e-5, .group = r.world, .overlap = overlap});
      const Caught caught = catch_error([&] {
        for (;;) {
          net->zero_grad();
          const torch::Tensor hidden = net->fc1->forward(numbers({4, 8}, r.rank));
          // The fault strikes inside backward: between the second layer's gradients and the first's.
          hidden.register_hook([&r](const torch::Tensor&) { r.step(); });
          loss_of(net->fc2->forward(hidden)).backward();
        }
      });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.lost_rank, 1) << caught;
      EXPECT_TRUE(names_rank(caught.text, 1)) << caught;
      const Caught later = catch_error([&] { loss_of(ddp->forward(numbers({4, 8}, r.rank))).backward(); });
      EXPECT_TRUE(later.is(ErrorKind::aborted)) << later;
    });
  }
}

TEST(DdpFault, AnUnusedParameterIsNamedOnAllRanks) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    run_ranks({.n = 3}, [overlap](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(
          net, {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5, .group = r.world, .overlap = overlap});
      loss_of(ddp->forward(numbers({4, 8}))).backward();
      r.world->barrier();
      // Rank 2 leaves the second layer out.
      const Caught caught = catch_error([&] {
        net->zero_grad();
        const torch::Tensor x = numbers({4, 8});
        loss_of(r.rank == 2 ? net->fc1->forward(x) : ddp->forward(x)).backward();
        r.world->barrier();
      });
      EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
      EXPECT_TRUE(contains(caught.text, "on rank 2 for parameters fc2.weight, fc2.bias")) << caught;
      EXPECT_TRUE(contains(caught.text, "find_unused_parameters")) << caught;
    });
  }
}

TEST(DdpFault, AnUnusedParameterInTheFirstBackward) {
  run_ranks({.n = 2, .as = As::processes, .limit = kLimit}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    const Caught caught = catch_error([&] { loss_of(net->fc1->forward(numbers({4, 8}))).backward(); });
    EXPECT_TRUE(contains(caught.text, "fc2.weight, fc2.bias")) << caught;
  });
}

TEST(DdpFault, DifferentModulesAreAnError) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto wrap = [&](std::shared_ptr<torch::nn::Module> module, DdpOptions options = {}) {
      options.group = r.world;
      const Caught caught = catch_error([&] { DistributedDataParallel<torch::nn::Module> ddp(module, options); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      return caught.text;
    };
    const std::string where = training_device().is_cuda() ? " on a GPU" : "";
    const std::string shape = wrap(std::make_shared<NetImpl>(r.rank == 1 ? 5 : 4));
    EXPECT_TRUE(contains(shape, "ranks 0, 2 have parameter fc1.weight Float [4, 8]" + where +
                                    "; rank 1 has parameter fc1.weight Float [5, 8]" + where))
        << shape;

    auto dtype = std::make_shared<NetImpl>(4);
    if (r.rank == 2) dtype->fc2->to(torch::kFloat64);
    const std::string other = wrap(dtype);
    EXPECT_TRUE(
        contains(other, "parameter fc2.weight Float [4, 4]" + where + "; rank 2 has parameter fc2.weight Double"))
        << other;

    auto frozen = std::make_shared<NetImpl>(4);
    if (r.rank == 0) frozen->fc1->bias.requires_grad_(false);
    const std::string without = wrap(frozen);
    EXPECT_TRUE(contains(without, "fc1.bias")) << without;

    const std::string count = wrap(r.rank == 0 ? std::make_shared<NetImpl>(4, true) : std::make_shared<NetImpl>(4));
    EXPECT_TRUE(contains(count, "norm.weight")) << count;

    DdpOptions options;
    options.bucket_cap_mb = r.rank == 0 ? 25 : 26;
    const std::string option = wrap(std::make_shared<NetImpl>(4), options);
    EXPECT_TRUE(contains(option, "option bucket_cap_mb = 25; ranks 1, 2 have option bucket_cap_mb = 26")) << option;

    // The group is as good as before.
    DistributedDataParallel<NetImpl> ddp(std::make_shared<NetImpl>(4), {.group = r.world});
    loss_of(ddp->forward(numbers({4, 8}))).backward();
  });
}

TEST(DdpFault, ModulesThatCannotBeWrapped) {
  run_ranks({.n = 1}, [](Rank& r) {
    const DdpOptions options{.group = r.world};
    const auto expect_error = [](auto call, const char* text) {
      const Caught caught = catch_error(call);
      EXPECT_TRUE(caught.any && contains(caught.text, text)) << "expected \"" << text << "\", got " << caught;
    };
    expect_error([&] { DistributedDataParallel<NetImpl> ddp(std::shared_ptr<NetImpl>(), options); }, "null");
    expect_error([&] { DistributedDataParallel<torch::nn::ReLU> ddp(torch::nn::ReLU(), options); }, "no parameter");
    DdpOptions wrong = options;
    wrong.bucket_cap_mb = 0;
    expect_error([&] { DistributedDataParallel<NetImpl> ddp(std::make_shared<NetImpl>(), wrong); }, "bucket_cap_mb");
    expect_error([&] { DistributedDataParallel<NetImpl> ddp(std::make_shared<NetImpl>()); }, "init_process_group");
    expect_error([&] { comm_hook_named("zip"); }, "fp16");

    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, options);
    expect_error([&] { ddp.set_weight(2); }, "Average::samples");
    expect_error([&] { ddp.register_comm_hook(nullptr); }, "empty");
    ddp.register_comm_hook(allreduce_hook());
    expect_error([&] { ddp.register_comm_hook(allreduce_hook()); }, "already");
    expect_error([&] { loss_of(ddp->forward(numbers({4, 8}))).backward({}, true, true); }, "create_graph");
    net->zero_grad(true);
    loss_of(ddp->forward(numbers({4, 8}))).backward();
    net->to(torch::kFloat64);
    net->zero_grad(true);
    expect_error([&] { ddp->forward(numbers({4, 8}).to(torch::kFloat64)); }, "was converted");

    torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(4, 3).sparse(true));
    DistributedDataParallel embedding(sparse, options);
    expect_error([&] { embedding->forward(torch::tensor({1, 2})).sum().backward(); }, "sparse");
  });
}

/// Backward through both layers; the user's own code fails between them if `fails`.
void backward_through(NetImpl& net, int seed, bool fails) {
  net.zero_grad();
  const torch::Tensor hidden = ThrowInBackward::apply(net.fc1->forward(numbers({4, 8}, seed)), fails);
  loss_of(net.fc2->forward(hidden)).backward();
}

// The user's own code fails in the middle of a backward that has not communicated, on one rank or on all; the next step
// is as good as any.
TEST(DdpFault, ABackwardThatFailsBeforeItCommunicatesIsForgotten) {
  for (const int failing : {1, 2}) {
    run_ranks({.n = 2}, [failing](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(
          net, {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5, .group = r.world, .overlap = Overlap::none});
      for (int step = 0; step < 3; ++step) {
        if (r.rank < failing) {
          EXPECT_THROW(backward_through(*net, r.rank, true), std::runtime_error);
        }
        EXPECT_NO_THROW(backward_through(*net, r.rank, false));
        torch::Tensor root = net->fc1->weight.grad().clone();
        broadcast(root, 0, {.group = r.world});
        EXPECT_TRUE(torch::equal(root, net->fc1->weight.grad()));
      }
      EXPECT_EQ(ddp.statistics().backwards, 3u);
    });
  }
}

// One that has launched a bucket cannot be taken back: the others would average other buckets with this rank's from
// then on.
TEST(DdpFault, ABackwardThatFailsAfterItCommunicatedIsAnErrorOnAllRanks) {
  for (const Overlap overlap : {Overlap::inline_, Overlap::thread}) {
    for (const int n : {2, 3}) {
      run_ranks({.n = n}, [overlap](Rank& r) {
        // Square layers: their buckets are equally long, so that no length tells them apart.
        auto net = std::make_shared<NetImpl>(8);
        net->fc2 = net->replace_module("fc2", torch::nn::Linear(8, 8));
        net->to(training_device());
        DistributedDataParallel<NetImpl> ddp(
            net, {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5, .group = r.world, .overlap = overlap});
        backward_through(*net, r.rank, false);
        r.world->barrier();
        if (r.rank == 1) {
          EXPECT_THROW(backward_through(*net, r.rank, true), std::runtime_error);
        }
        const Caught caught = catch_error([&] {
          for (int step = 0; step < 3; ++step) backward_through(*net, r.rank, false);
        });
        EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
        EXPECT_TRUE(contains(caught.text, "backward failed on rank 1")) << caught;
        EXPECT_TRUE(contains(caught.text, "of 4 buckets")) << caught;
      });
    }
  }
}

TEST(DdpFault, ABackwardThatFailsAfterSyncBatchNormIsAnErrorOnAllRanks) {
  run_ranks({.n = 2}, [](Rank& r) {
    nn::SyncBatchNorm norm(8, r.world);
    norm->to(training_device());
    const auto backward = [&](bool fails) {
      const torch::Tensor x = ThrowInBackward::apply(numbers({4, 8}, r.rank).requires_grad_(), fails);
      loss_of(norm->forward(x)).backward();
    };
    backward(false);
    if (r.rank == 1) {
      EXPECT_THROW(backward(true), std::runtime_error);
    }
    const Caught caught = catch_error([&] {
      for (int step = 0; step < 3; ++step) backward(false);
    });
    EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
    EXPECT_TRUE(contains(caught.text, "backward failed on rank 1")) << caught;
    EXPECT_TRUE(contains(caught.text, "SyncBatchNorm")) << caught;
  });
}

// The whole way as a program goes it: default group, wrapper, destruction in the order of main().
TEST(DdpFault, AProgramOnTheDefaultGroup) {
  run_ranks({.n = 2, .as = As::processes, .init = false, .limit = kLimit}, [](Rank& r) {
    init_process_group(r.init_options());
    torch::nn::Sequential net(torch::nn::Linear(8, 4), torch::nn::ReLU(), torch::nn::Linear(4, 1));
    net->to(training_device());
    DistributedDataParallel ddp(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      const torch::Tensor loss = loss_of(ddp->forward(numbers({4, 8}, r.rank)) - 1);
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, first);
    EXPECT_EQ(ddp.group(), get_default_group());
    barrier();
    destroy_process_group();
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_fault_test
