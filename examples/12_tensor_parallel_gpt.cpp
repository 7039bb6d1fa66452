// The GPT of 07_gpt with the matrices of every layer divided over ranks: tensor parallelism, and data parallelism on
// top.
//
//   build/bin/maniple run -n 4 build/bin/examples/12_tensor_parallel_gpt --tensor 2      two models over two ranks
//                                                                                        each; the text is LICENSE
//   build/bin/maniple run -n 2 build/bin/examples/12_tensor_parallel_gpt --measure 20    does not train: measures a
//                                                                                        layer on one rank and on all
//
// Options:
//   --tensor N        ranks over which a model is divided (default: all)
//   --compare N       run the first N steps also on the undivided model; fail if the losses differ
//   --measure N       measure N rounds instead of training
//   --text FILE  --steps N  --lr X
//   --batch-size N    of all ranks together
//   --block N  --width N  --layers N  --heads N
//   --target X        fail if the loss stays above X
//   --explain         print what each rank holds and sends; compare the computed bytes with the bytes sent
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include "explain.h"
#include "models/byte_gpt.h"
#include <maniple/maniple.h>

namespace {

using Group = std::shared_ptr<maniple::ProcessGroup>;
constexpr std::int64_t kVocabulary = maniple::ByteText::kVocabulary;

// The layers of models/byte_gpt.h, divided. Parameters have the same names and are drawn in the same order.

/// Each rank has the embeddings of some bytes and of all places.
struct EmbeddingImpl : torch::nn::Module {
  EmbeddingImpl(const models::ByteGptOptions& sizes, const Group& group)
      : bytes(
            register_module("bytes", maniple::nn::VocabParallelEmbedding(
                                         kVocabulary, sizes.width, maniple::nn::VocabParallelOptions{.group = group}))),
        places(register_module("places", torch::nn::Embedding(sizes.block, sizes.width))) {}
  torch::Tensor forward(const torch::Tensor& text) {
    return bytes(text) + places(torch::arange(text.size(1), text.device()));
  }
  maniple::nn::VocabParallelEmbedding bytes;
  torch::nn::Embedding places;
};
TORCH_MODULE(Embedding);

/// Each rank computes the scores of some bytes.
struct HeadImpl : maniple::nn::ColumnParallelLinearImpl {
  HeadImpl(std::int64_t width, const Group& group)
      : ColumnParallelLinearImpl(width, kVocabulary, maniple::nn::ColumnParallelOptions{.bias = false, .group = group}),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {}
  torch::Tensor forward(const torch::Tensor& x) { return ColumnParallelLinearImpl::forward(norm(x)); }
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Head);

maniple::nn::ParallelTransformerBlock divided_layer(const models::ByteGptOptions& sizes, const Group& group) {
  return maniple::nn::ParallelTransformerBlock(
      maniple::nn::ParallelBlockOptions{.width = sizes.width, .heads = sizes.heads, .group = group});
}

torch::nn::Sequential divided_gpt(const models::ByteGptOptions& sizes, const Group& group) {
  torch::nn::Sequential net;
  net->push_back(Embedding(sizes, group));
  for (std::int64_t i = 0; i < sizes.layers; ++i) net->push_back(divided_layer(sizes, group));
  net->push_back(Head(sizes.width, group));
  return net;
}

/// This rank's memory, and its traffic for a batch of `rows`.
Explanation explanation(const models::ByteGptOptions& sizes, const maniple::DeviceMesh& mesh,
                        const torch::nn::Sequential& net, std::int64_t rows) {
  const int ranks = mesh.size("tensor"), replicas = mesh.size("data");
  Explanation mine{.holds = "part " + std::to_string(mesh.coordinate("tensor")) + " of " + std::to_string(ranks) +
                            " of every layer"};
  mine.count(net->parameters());
  mine.activation_bytes = models::activation_bytes(sizes, 0, sizes.layers + 2, rows, ranks);
  if (ranks > 1) {
    // All-reduces of activations: in forward one for the embedding and two per layer, in backward two per layer and one
    // for the head.
    const auto activations = static_cast<std::uint64_t>(4 * sizes.layers + 2);
    const auto places = static_cast<std::uint64_t>(rows * sizes.block), width = static_cast<std::uint64_t>(sizes.width);
    std::string others;
    for (const int rank : mesh.ranks_along("tensor")) others += " " + std::to_string(rank);
    mine.traffic.push_back({"activations and their gradients, all_reduce with ranks" + others, activations,
                            activations * places * width * 4});
    // The maximum score of each place, then two sums.
    mine.traffic.push_back({"cross-entropy, all_reduce with ranks" + others, 2, 3 * places * 4});
  }
  if (replicas > 1) {
    std::string others;
    for (const int rank : mesh.ranks_along("data")) others += " " + std::to_string(rank);
    mine.traffic.push_back({"gradients averaged over ranks" + others + ", all_reduce", 1, mine.gradient_bytes});
  }
  return mine;
}

/// The bytes that the ranks of a model exchange.
std::uint64_t bytes_inside(const Explanation& mine) {
  std::uint64_t bytes = 0;
  for (const Traffic& one : mine.traffic)
    bytes += one.what.find("all_reduce with") != std::string::npos ? one.bytes : 0;
  return bytes;
}

double cpu_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

struct Time {
  double wall_ms = 0, cpu_ms = 0;
};

/// Measures forward and backward of one layer, in turn on rank 0 alone and divided over the group's ranks.
void measure(const models::ByteGptOptions& sizes, const Group& group, std::size_t rounds, std::int64_t rows) {
  const auto world = maniple::get_default_group();
  const auto x = torch::randn({rows, sizes.block, sizes.width});
  models::GptLayer whole(sizes);
  auto divided = divided_layer(sizes, group);
  const auto time_of = [&](const auto& step) {
    world->barrier();
    const double cpu = cpu_ms();
    const auto begin = std::chrono::steady_clock::now();
    step();
    const auto end = std::chrono::steady_clock::now();
    return Time{std::chrono::duration<double, std::milli>(end - begin).count(), cpu_ms() - cpu};
  };
  const auto pass = [&](auto& layer) { layer->forward(x.detach().requires_grad_()).pow(2).mean().backward(); };
  const auto alone = [&] {
    if (world->rank() == 0) pass(whole);
  };
  const auto together = [&] { pass(divided); };
  for (int i = 0; i < 3; ++i) time_of(alone), time_of(together);
  std::vector<Time> one, all;
  for (std::size_t i = 0; i < rounds; ++i) {
    one.push_back(time_of(alone));
    all.push_back(time_of(together));
  }
  const auto least = [](const std::vector<Time>& times, double Time::* field) {
    double best = INFINITY;
    for (const Time& time : times) best = std::min(best, time.*field);
    return best;
  };
  maniple::print_once("a layer of width ", sizes.width, " on ", rows, " x ", sizes.block, " places, best of ", rounds,
                      ": ", least(one, &Time::wall_ms), " ms on one rank (", least(one, &Time::cpu_ms),
                      " ms of processor time), ", least(all, &Time::wall_ms), " ms over ", group->size(), " (",
                      least(all, &Time::cpu_ms),
                      " ms on rank 0): ", least(one, &Time::wall_ms) / least(all, &Time::wall_ms), " times as fast");
}

}  // namespace

int main(int argc, char** argv) try {
  std::string file = "LICENSE";
  std::size_t tensor = 0, compared = 0, measured = 0;
  std::size_t steps = 300, batch_size = 32, block = 64, width = 128, layers = 3, heads = 4;
  double rate = 3e-3, target = 1e9;
  bool explain = false;
  read_arguments(argc, argv,
                 {{"--text", &file},
                  {"--tensor", &tensor},
                  {"--compare", &compared},
                  {"--measure", &measured},
                  {"--steps", &steps},
                  {"--lr", &rate},
                  {"--batch-size", &batch_size},
                  {"--block", &block},
                  {"--width", &width},
                  {"--layers", &layers},
                  {"--heads", &heads},
                  {"--target", &target},
                  {"--explain", &explain}});
  maniple::init_process_group();
  const int ranks = tensor == 0 ? maniple::get_world_size() : static_cast<int>(tensor);
  if (ranks < 1 || maniple::get_world_size() % ranks != 0)
    throw std::invalid_argument("the number of ranks must be a multiple of --tensor");
  // With 4 ranks and --tensor 2, ranks 0 1 and 2 3 are models; ranks 0 2 and 1 3 have the same parts. The dimension
  // that communicates most comes last, so that its ranks share a host.
  const auto mesh = maniple::init_device_mesh({{"data", -1}, {"tensor", ranks}});
  const Group tensor_group = mesh["tensor"], data_group = mesh["data"];
  maniple::apply_fast_settings({.threads = 1});
  const auto number = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  const models::ByteGptOptions sizes{
      .block = number(block), .width = number(width), .layers = number(layers), .heads = number(heads)};
  const auto rows = maniple::per_process_batch_size(batch_size, data_group->size());
  if (measured > 0) {
    measure(sizes, tensor_group, measured, number(rows));
    return 0;
  }

  maniple::seed_all(7);  // the same seed on all ranks: each draws the whole model and keeps its part
  auto net = divided_gpt(sizes, tensor_group);
  maniple::DistributedDataParallel ddp(net, {.group = data_group});
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(rate));
  if (explain) print_explanations(explanation(sizes, mesh, net, number(rows)));

  torch::nn::Sequential whole;  // for --compare
  std::optional<torch::optim::AdamW> whole_optimizer;
  if (compared > 0) {
    maniple::seed_all(7);
    whole = models::byte_gpt(sizes);
    whole_optimizer.emplace(whole->parameters(), torch::optim::AdamWOptions(rate));
  }

  maniple::ByteText text(file, {.block_size = block, .stride = 1});
  // All ranks of a model use the same batches.
  maniple::DistributedSampler sampler(text.size().value(), {.seed = 7, .group = data_group});
  const auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler, rows);
  double mean = 0, largest_difference = 0;
  for (std::size_t epoch = 0, step = 0; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : *loader) {
      const std::uint64_t sent = maniple::tensor_parallel_statistics().bytes;
      optimizer.zero_grad();
      const auto loss = maniple::vocab_parallel_cross_entropy(ddp.forward(batch.data), batch.target, kVocabulary,
                                                              {.group = tensor_group});
      loss.backward();
      optimizer.step();
      if (explain) {
        require_as_explained("activations and cross-entropy",
                             bytes_inside(explanation(sizes, mesh, net, batch.data.size(0))),
                             maniple::tensor_parallel_statistics().bytes - sent);
      }
      auto value = loss.detach().clone();
      maniple::all_reduce(value, maniple::ReduceOp::avg, {.group = data_group});
      if (step < compared) {
        const auto everywhere = [&](const torch::Tensor& part) {
          std::vector<torch::Tensor> parts;
          for (int i = 0; i < data_group->size(); ++i) parts.push_back(torch::empty_like(part));
          maniple::all_gather(parts, part, {.group = data_group});
          return torch::cat(parts);
        };
        whole_optimizer->zero_grad();
        const auto expected = models::byte_loss(whole->forward(everywhere(batch.data)), everywhere(batch.target));
        expected.backward();
        whole_optimizer->step();
        const double difference = std::abs(value.item<double>() / expected.item<double>() - 1);
        largest_difference = std::max(largest_difference, difference);
        if (!(difference < 1e-5)) {
          std::fprintf(stderr, "step %zu: loss %.9g, but %.9g of the undivided model\n", step + 1, value.item<double>(),
                       expected.item<double>());
          return 1;
        }
        if (step + 1 == compared)
          maniple::print_once("losses of ", compared, " steps match the undivided model's to ", largest_difference);
      }
      mean = step == 0 ? value.item<double>() : 0.95 * mean + 0.05 * value.item<double>();
      if (++step % 50 == 0 || step == steps) maniple::print_once("step ", step, ": loss ", mean);
      if (step == steps) break;
    }
  }
  return mean < target ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
