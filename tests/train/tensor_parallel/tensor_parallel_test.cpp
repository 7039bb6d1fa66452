// Tensor parallelism: whatever the number of ranks, outputs and gradients equal the undivided model's. In float64,
// so that the order of additions is all that may differ: 1e-12 of values around 1.
#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/models.h"
#include <maniple/dist.h>
#include <maniple/train/checkpoint.h>
#include <maniple/train/ddp.h>
#include <maniple/train/tensor_parallel.h>

namespace maniple::harness::tensor_parallel_test {
namespace {

using torch::Tensor;
constexpr double kTolerance = 1e-12;
constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine
const auto kReal = torch::TensorOptions().dtype(torch::kFloat64);

using maniple::testing_models::training_device;

/// Of a generator of its own: ranks that are threads share LibTorch's. The same values on every device.
Tensor random_tensor(std::vector<std::int64_t> sizes, std::uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed), kReal).to(training_device());
}

/// The fewest that are worth the time it takes to start them, where they are processes.
std::vector<int> numbers_of_ranks() {
  return test_device().is_cpu() ? std::vector<int>{1, 2, 3, 4} : std::vector<int>{2, 3, 4};
}

Tensor leaf(const Tensor& x) { return x.detach().clone().requires_grad_(); }

void expect_close(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_TRUE(torch::allclose(a, b, kTolerance, kTolerance)) << what << ": differs by " << (a - b).abs().max();
}

/// Parameters of the undivided model, by name, with gradients.
using Whole = std::map<std::string, Tensor>;

/// Calls f(name, parameter, this rank's part of the whole tensor) for every parameter.
template <class F>
void for_each_part(torch::nn::Module& module, const Whole& whole, bool of_gradients, const F& f,
                   const std::string& prefix = "") {
  for (auto& entry : module.named_parameters(false)) {
    const Tensor all = of_gradients ? whole.at(prefix + entry.key()).grad() : whole.at(prefix + entry.key()).detach();
    Tensor part = all;
    if (const auto* divided = dynamic_cast<ShardedModule*>(&module)) {
      if (const auto shard = divided->shard_of(entry.key())) {
        for (std::int64_t d = 0; d < all.dim(); ++d)
          part = part.narrow(d, shard->offset[static_cast<std::size_t>(d)], entry.value().size(d));
      }
    }
    f(prefix + entry.key(), entry.value(), part);
  }
  for (auto& child : module.named_children())
    for_each_part(*child.value(), whole, of_gradients, f, prefix + child.key() + ".");
}

/// Gives the module the values of the whole one.
void take_values(torch::nn::Module& module, const Whole& whole) {
  module.to(training_device(), torch::kFloat64);
  const torch::NoGradGuard no_grad;
  for_each_part(module, whole, false, [](const std::string&, Tensor& mine, const Tensor& part) { mine.copy_(part); });
}

void expect_gradients(torch::nn::Module& module, const Whole& whole) {
  for_each_part(module, whole, true, [](const std::string& name, Tensor& mine, const Tensor& part) {
    ASSERT_TRUE(mine.grad().defined()) << name;
    expect_close(mine.grad(), part, name);
  });
}

TEST(TensorParallel, SharesAreEqualOrNearlySo) {
  for (const int size : {1, 2, 3, 7}) {
    std::int64_t at = 0;
    for (int r = 0; r < size; ++r) {
      const GroupShare share = group_share(10, r, size);
      EXPECT_EQ(share.begin, at);
      EXPECT_TRUE(share.count == 10 / size || share.count == 10 / size + 1);
      at += share.count;
    }
    EXPECT_EQ(at, 10);
  }
}

TEST(TensorParallel, LinearLayersEqualTheUndividedOnes) {
  for (const int n : numbers_of_ranks()) {
    run_ranks({.n = n, .limit = kLimit}, [&](Rank& r) {
      Whole whole = {{"weight", leaf(random_tensor({10, 6}, 1))}, {"bias", leaf(random_tensor({10}, 2))}};
      Whole second = {{"weight", leaf(random_tensor({5, 10}, 3))}, {"bias", leaf(random_tensor({5}, 4))}};
      const Tensor input = random_tensor({6, 3, 2}, 5).permute({1, 2, 0});  // not contiguous
      const Tensor x = leaf(input), mine = input.detach().clone().requires_grad_();
      const Tensor hidden = torch::linear(x, whole["weight"], whole["bias"]);
      const Tensor y = torch::linear(torch::tanh(hidden), second["weight"], second["bias"]);
      y.pow(2).sum().backward();

      for (const bool gathered : {false, true}) {  // the hidden layer stays divided, or is put together between
        nn::ColumnParallelLinear column(6, 10, nn::ColumnParallelOptions{.gather_output = gathered, .group = r.world});
        nn::RowParallelLinear row(10, 5, nn::RowParallelOptions{.input_is_divided = !gathered, .group = r.world});
        take_values(*column, whole);
        take_values(*row, second);
        mine.mutable_grad() = Tensor();
        const Tensor z = row(torch::tanh(column(mine)));
        expect_close(z, y, "output");
        z.pow(2).sum().backward();
        expect_close(mine.grad(), x.grad(), "gradient of the input");
        expect_gradients(*column, whole);
        expect_gradients(*row, second);
      }
    });
  }
}

struct Block {
  static constexpr std::int64_t kWidth = 12, kHeads = 4, kHidden = 10;
  Block() {
    std::uint64_t seed = 10;
    const auto add = [&](const std::string& name, std::vector<std::int64_t> sizes) {
      whole[name] = leaf(random_tensor(std::move(sizes), ++seed) * 0.5);
    };
    for (const char* norm : {"norm1", "norm2"})
      for (const char* name : {".weight", ".bias"}) add(norm + std::string(name), {kWidth});
    for (const char* layer : {"attention.query", "attention.key", "attention.value", "attention.proj"}) {
      add(layer + std::string(".weight"), {kWidth, kWidth});
      add(layer + std::string(".bias"), {kWidth});
    }
    add("fc.weight", {kHidden, kWidth}), add("fc.bias", {kHidden});
    add("proj.weight", {kWidth, kHidden}), add("proj.bias", {kWidth});
  }
  /// With LibTorch's own functions.
  Tensor forward(const Tensor& x) {
    const auto norm = [&](const std::string& name, const Tensor& of) {
      return torch::layer_norm(of, {kWidth}, whole[name + ".weight"], whole[name + ".bias"], 1e-5);
    };
    const auto linear = [&](const std::string& name, const Tensor& of) {
      return torch::linear(of, whole[name + ".weight"], whole[name + ".bias"]);
    };
    const Tensor in = norm("norm1", x);
    const auto heads = [&](const std::string& name) {
      return linear("attention." + name, in).view({x.size(0), x.size(1), kHeads, -1}).permute({0, 2, 1, 3});
    };
    Tensor scores = torch::einsum("bhqd,bhkd->bhqk", {heads("query"), heads("key")}) / std::sqrt(kWidth / kHeads * 1.0);
    scores = scores + torch::full({x.size(1), x.size(1)}, -INFINITY, x.options().requires_grad(false)).triu(1);
    const Tensor seen = torch::einsum("bhqk,bhkd->bqhd", {scores.softmax(-1), heads("value")}).reshape(x.sizes());
    const Tensor y = x + linear("attention.proj", seen);
    return y + linear("proj", torch::gelu(linear("fc", norm("norm2", y))));
  }
  Whole whole;
};

TEST(TensorParallel, ATransformerBlockEqualsTheUndividedOne) {
  for (const int n : numbers_of_ranks()) {
    for (const bool sequence_parallel : {false, true}) {
      run_ranks({.n = n, .limit = kLimit}, [&](Rank& r) {
        Block block;
        const Tensor input = random_tensor({2, 12, Block::kWidth}, 99);
        const Tensor x = leaf(input), mine = leaf(input);
        const Tensor y = block.forward(x);
        (y * y).mean().backward();
        nn::ParallelTransformerBlock divided(nn::ParallelBlockOptions{.width = Block::kWidth,
                                                                      .heads = Block::kHeads,
                                                                      .mlp_width = Block::kHidden,
                                                                      .sequence_parallel = sequence_parallel,
                                                                      .group = r.world});
        take_values(*divided, block.whole);
        Tensor z = sequence_parallel ? gather_from_group(divided(scatter_to_group(mine, 1, r.world)), 1, r.world)
                                     : divided(mine);
        expect_close(z, y, "output");
        (z * z).mean().backward();
        expect_close(mine.grad(), x.grad(), "gradient of the input");
        expect_gradients(*divided, block.whole);
      });
    }
  }
}

TEST(TensorParallel, EmbeddingAndCrossEntropyEqualTheUndividedOnes) {
  constexpr std::int64_t kVocabulary = 11, kWidth = 6;
  const auto device = training_device();
  const Tensor ids = torch::tensor({{0, 10, 3, 5}, {7, 7, 4, 1}, {2, 6, 9, 8}}, torch::kInt64).to(device);
  const Tensor targets = torch::tensor({{10, 3, 5, -100}, {7, 4, 1, 0}, {6, -100, 8, 2}}, torch::kInt64).to(device);
  for (const int n : numbers_of_ranks()) {
    for (const bool sequence_parallel : {false, true}) {
      run_ranks({.n = n, .limit = kLimit}, [&](Rank& r) {
        Whole table = {{"weight", leaf(random_tensor({kVocabulary, kWidth}, 1))}};
        Whole head = {{"weight", leaf(random_tensor({kVocabulary, kWidth}, 2))}};
        const Tensor logits = torch::linear(torch::embedding(table["weight"], ids), head["weight"]) * 3;
        const Tensor loss = torch::nll_loss(logits.log_softmax(-1).view({-1, kVocabulary}), targets.view(-1));
        loss.backward();
        nn::VocabParallelEmbedding embedding(
            kVocabulary, kWidth, nn::VocabParallelOptions{.sequence_parallel = sequence_parallel, .group = r.world});
        nn::ColumnParallelLinear linear(
            kWidth, kVocabulary,
            nn::ColumnParallelOptions{.bias = false, .sequence_parallel = sequence_parallel, .group = r.world});
        take_values(*embedding, table);
        take_values(*linear, head);
        if (sequence_parallel && 4 % n != 0) {  // four tokens
          EXPECT_NE(error_of([&] { embedding(ids); }).find("4 tokens cannot be divided evenly over 3 ranks"),
                    std::string::npos);
          return;
        }
        const Tensor mine =
            vocab_parallel_cross_entropy(linear(embedding(ids)) * 3, targets, kVocabulary, {.group = r.world});
        expect_close(mine, loss, "loss");
        mine.backward();
        expect_gradients(*embedding, table);
        expect_gradients(*linear, head);
        const Tensor each = vocab_parallel_cross_entropy(linear(embedding(ids)) * 3, targets, kVocabulary,
                                                         {.reduction = torch::Reduction::None, .group = r.world});
        EXPECT_EQ(each.sizes(), targets.sizes());
        expect_close(each.sum() / 10, loss, "loss of each sample");
      });
    }
  }
}

TEST(TensorParallel, TheSameSeedGivesTheSameModelAndConsistentDropout) {
  run_ranks({.n = 3, .as = As::processes, .limit = kLimit}, [&](Rank& r) {
    torch::manual_seed(5);
    const torch::nn::Linear linear(7, 10);
    const torch::nn::Linear wide(10, 4);
    const torch::nn::Embedding table(8, 3);
    const Tensor after = torch::rand({1});
    torch::manual_seed(5);
    nn::ColumnParallelLinear column(7, 10, nn::ColumnParallelOptions{.group = r.world});
    nn::RowParallelLinear row(10, 4, nn::RowParallelOptions{.group = r.world});
    nn::VocabParallelEmbedding embedding(8, 3, nn::VocabParallelOptions{.group = r.world});
    EXPECT_TRUE(torch::rand({1}).equal(after));
    const GroupShare ten = group_share(10, r.rank, 3), eight = group_share(8, r.rank, 3);
    EXPECT_TRUE(column->weight.equal(linear->weight.narrow(0, ten.begin, ten.count)));
    EXPECT_TRUE(column->bias.equal(linear->bias.narrow(0, ten.begin, ten.count)));
    EXPECT_TRUE(row->weight.equal(wide->weight.narrow(1, ten.begin, ten.count)));
    EXPECT_TRUE(row->bias.equal(wide->bias));
    EXPECT_TRUE(embedding->weight.equal(table->weight.narrow(0, eight.begin, eight.count)));

    const auto on_all = [&](const Tensor& x) {
      const Tensor all = torch::empty({3, x.numel()}, x.options());
      all_gather_into_tensor(all, x.contiguous(), {.group = r.world});
      return all;
    };
    const Tensor ones = torch::ones({1000}, training_device());
    const Tensor replicated = on_all(torch::dropout(ones, 0.5, true));
    EXPECT_TRUE(replicated[0].equal(replicated[1]) && replicated[0].equal(replicated[2]));
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const Tensor before = generator.get_state();
    const Tensor divided = on_all(sharded_dropout(ones, 0.25, true, r.world));
    EXPECT_FALSE(divided[0].equal(divided[1]) || divided[0].equal(divided[2]) || divided[1].equal(divided[2]));
    for (int i = 0; i < 3; ++i) EXPECT_NEAR(divided[i].mean().item<float>(), 1.0, 0.15);
    EXPECT_FALSE(sharded_dropout(ones, 0.25, true, r.world).equal(divided[r.rank])) << "the next call drops others";
    generator.set_state(before);
    EXPECT_TRUE(sharded_dropout(ones, 0.25, true, r.world).equal(divided[r.rank]))
        << "the generator's state is all there is";
    const Tensor next = on_all(torch::rand({5}).to(training_device()));
    EXPECT_TRUE(next[0].equal(next[1]) && next[0].equal(next[2])) << "generators stay equal";
    EXPECT_TRUE(sharded_dropout(ones, 0.25, false, r.world).equal(ones));
  });
}

TEST(TensorParallel, WithDataParallelismOverAnotherDimension) {
  run_ranks({.n = 4, .limit = kLimit}, [&](Rank& r) {
    const auto tensor = r.world->split(r.rank / 2), data = r.world->split(r.rank % 2);
    Block block;
    const Tensor input = random_tensor({4, 6, Block::kWidth}, 7);
    nn::ParallelTransformerBlock divided(nn::ParallelBlockOptions{
        .width = Block::kWidth, .heads = Block::kHeads, .mlp_width = Block::kHidden, .group = tensor});
    take_values(*divided, block.whole);
    DistributedDataParallel<nn::ParallelTransformerBlock> ddp(divided, {.group = data});
    for (int step = 0; step < 3; ++step) {
      for (auto& [name, parameter] : block.whole) parameter.mutable_grad() = Tensor();
      block.forward(input).pow(2).mean().backward();
      for (auto& parameter : divided->parameters()) parameter.mutable_grad() = Tensor();
      ddp.forward(input.narrow(0, 2 * data->rank(), 2)).pow(2).mean().backward();
      expect_gradients(*divided, block.whole);
      const torch::NoGradGuard no_grad;
      for (auto& [name, parameter] : block.whole) parameter -= 0.1 * parameter.grad();
      for (auto& parameter : divided->parameters()) parameter -= 0.1 * parameter.grad();
    }
  });
}

/// A block and its optimizer after two steps, or before any.
struct Trained {
  Trained(const std::string& folder, const Rank& r)
      : divided(nn::ParallelBlockOptions{
            .width = Block::kWidth, .heads = Block::kHeads, .mlp_width = Block::kHidden, .group = r.world}),
        optimizer(divided->parameters(), torch::optim::AdamWOptions(0.01)),
        checkpoint({.folder = folder, .background = false, .sharded = true, .group = r.world}) {
    take_values(*divided, Block().whole);
    checkpoint.add("model", *divided).add("optimizer", optimizer);
  }
  void step() {
    optimizer.zero_grad();
    divided(random_tensor({2, 6, Block::kWidth}, 3)).pow(2).mean().backward();
    optimizer.step();
  }
  /// With the parameters of all ranks.
  Tensor output() { return divided(random_tensor({2, 6, Block::kWidth}, 4)).detach(); }
  nn::ParallelTransformerBlock divided;
  torch::optim::AdamW optimizer;
  Checkpoint checkpoint;
};

TEST(TensorParallel, ACheckpointLoadsOnAnyNumberOfRanks) {
  const SharedFolder shared;
  run_ranks({.n = 4, .limit = kLimit, .env = shared.env()}, [](Rank& r) {
    Trained run(SharedFolder::here(), r);
    run.step();
    run.step();
    run.checkpoint.save(2);
    EXPECT_EQ(run.checkpoint.last_error(), "");
    const Tensor saved = run.output();
    run.step();  // with the optimizer's state
    const Tensor next = run.output();
    if (r.rank == 0) torch::save(std::vector<Tensor>{saved.cpu(), next.cpu()}, SharedFolder::here() + "/outputs.pt");
  });
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n, .limit = kLimit, .env = shared.env()}, [](Rank& r) {
      Trained run(SharedFolder::here(), r);
      EXPECT_EQ(run.checkpoint.load(), std::optional<std::int64_t>(2));
      std::vector<Tensor> expected;
      torch::load(expected, SharedFolder::here() + "/outputs.pt");
      expect_close(run.output().cpu(), expected.at(0), "what was saved");
      run.step();
      expect_close(run.output().cpu(), expected.at(1), "the step after it");
    });
  }
}

TEST(TensorParallel, InvalidLayersAreRefusedInOneLine) {
  run_ranks({.n = 3}, [&](Rank& r) {
    const auto group = r.world;
    const auto expect = [&](const std::string& text, const std::function<void()>& call) {
      const std::string error = error_of(call);
      EXPECT_NE(error.find(text), std::string::npos) << error;
    };
    expect("2 outputs cannot be divided over 3 ranks",
           [&] { nn::ColumnParallelLinear(4, 2, nn::ColumnParallelOptions{.group = group}); });
    expect("10 inputs in units of 4",
           [&] { nn::RowParallelLinear(10, 2, nn::RowParallelOptions{.unit = 4, .group = group}); });
    expect("2 heads cannot be divided over 3 ranks",
           [&] { nn::ParallelAttention(nn::ParallelBlockOptions{.width = 8, .heads = 2, .group = group}); });
    expect("heads must divide the width",
           [&] { nn::ParallelAttention(nn::ParallelBlockOptions{.width = 8, .heads = 3, .group = group}); });
    nn::ColumnParallelLinear column(4, 6, nn::ColumnParallelOptions{.group = group});
    expect("weight is divided over the ranks, and one rank cannot save",
           [&] { Checkpoint({.folder = "unused", .group = group}).add("model", *column); });
    expect("input of [2, 5]; expected 4 in the last dimension", [&] { column(torch::ones({2, 5})); });
    nn::VocabParallelEmbedding embedding(5, 2, nn::VocabParallelOptions{.group = group});
    expect("id 5 is not in a vocabulary of 5", [&] { embedding(torch::tensor({0, 5})); });
    expect("id -1 is not in", [&] { embedding(torch::tensor({0, -1})); });
    expect("a target is 6; expected 0 to 5",
           [&] { vocab_parallel_cross_entropy(torch::ones({1, 2}), torch::tensor({6}), 6, {.group = group}); });
    expect("its share of a vocabulary of 7",
           [&] { vocab_parallel_cross_entropy(torch::ones({1, 7}), torch::tensor({6}), 7, {.group = group}); });
    expect("cannot be divided over 3 ranks", [&] { scatter_to_group(torch::ones({2}), 0, group); });
    expect("p is 2", [&] { sharded_dropout(torch::ones({2}), 2, true, group); });
  });
}

}  // namespace
}  // namespace maniple::harness::tensor_parallel_test
