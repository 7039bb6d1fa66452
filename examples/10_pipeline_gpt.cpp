// The GPT of 07_gpt in stages over ranks: a pipeline, or several of them side by side.
//
//   build/bin/maniple run -n 4 build/bin/examples/10_pipeline_gpt --pipe 2      two pipelines of two ranks each; the text is LICENSE
//   build/bin/maniple run -n 2 build/bin/examples/10_pipeline_gpt --measure 20  trains nothing: how long steps take, and how long ranks idle
//
// --pipe N: ranks of a pipeline (default: all)  --micro-batches N  --schedule gpipe, 1f1b, interleaved  --stages N: of each rank
// --checkpoint 1: activations are computed again in backward  --text FILE  --steps N  --batch-size N (of all pipelines together)  --block N
// --width N  --layers N  --heads N  --lr X  --target X: fail when the loss stays above  --measure N
#include <cmath>
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/maniple.h>

namespace {
namespace nn = torch::nn;

/// Bytes and their places.
struct Embed : nn::Module {
  Embed(std::int64_t b, std::int64_t w) : block(b), width(w) {
    const torch::NoGradGuard no_grad;
    bytes->weight.mul_(0.1);  // it is the head's weight, too
  }
  torch::Tensor forward(const torch::Tensor& text) {
    return bytes(text) + places(torch::arange(text.size(1), text.device()));
  }
  std::int64_t block, width;
  nn::Embedding bytes = register_module("bytes", nn::Embedding(maniple::ByteText::kVocabulary, width));
  nn::Embedding places = register_module("places", nn::Embedding(block, width));
};

struct Layer : nn::Module {
  Layer(std::int64_t w, std::int64_t h) : width(w), heads(h) {}
  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), places = x.size(1);
    const auto parts = in(norm1(x)).view({batch, places, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto scores = parts[0].matmul(parts[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads));
    const auto future = torch::ones({places, places}, x.options().dtype(torch::kBool)).triu(1);
    const auto seen = scores.masked_fill(future, -INFINITY).softmax(-1).matmul(parts[2]);
    x = x + out(seen.transpose(1, 2).reshape({batch, places, width}));
    return x + down(torch::gelu(up(norm2(x))));
  }
  std::int64_t width, heads;
  nn::Linear in = register_module("in", nn::Linear(width, 3 * width)),
             out = register_module("out", nn::Linear(width, width));
  nn::Linear up = register_module("up", nn::Linear(width, 4 * width)),
             down = register_module("down", nn::Linear(4 * width, width));
  nn::LayerNorm norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
  nn::LayerNorm norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
};

/// What may come next. Its weight is that of the embedding: tied, though the two are on different ranks.
struct Head : nn::Module {
  Head(std::int64_t width, const torch::Tensor& embedding)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        weight(register_parameter("weight", embedding)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(norm(x), weight); }
  nn::LayerNorm norm;
  torch::Tensor weight;
};

maniple::PipelineSchedule schedule_named(const std::string& name) {
  if (name == "gpipe") return maniple::PipelineSchedule::gpipe;
  if (name == "1f1b") return maniple::PipelineSchedule::one_f_one_b;
  if (name == "interleaved") return maniple::PipelineSchedule::interleaved;
  throw std::invalid_argument("--schedule is \"" + name + "\"; expected gpipe, 1f1b or interleaved");
}

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::cross_entropy_loss(output.flatten(0, 1), target.flatten());
}

/// Steps with one batch, and what each rank did meanwhile.
void measure(maniple::Pipeline& pipeline, std::size_t steps, std::size_t batch_size, std::size_t block,
             std::size_t micro_batches, int ranks, std::size_t stages) {
  const auto sizes = {static_cast<std::int64_t>(batch_size), static_cast<std::int64_t>(block)};
  const auto data = torch::randint(maniple::ByteText::kVocabulary, sizes, torch::kInt64);
  for (int i = 0; i < 3; ++i) pipeline.step(data, data);  // memory, shapes, connections
  const auto before = pipeline.statistics();
  for (std::size_t i = 0; i < steps; ++i) pipeline.step(data, data);
  auto row = pipeline.statistics();
  row.steps -= before.steps;
  row.step_ms -= before.step_ms;
  row.compute_ms -= before.compute_ms;
  row.cpu_ms -= before.cpu_ms;
  row.wait_ms -= before.wait_ms;
  row.sent_bytes -= before.sent_bytes;
  const auto texts = maniple::gather_object(row.text());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) std::printf("rank %zu: %s\n", rank, texts[rank].c_str());
  const double p = ranks, m = static_cast<double>(micro_batches * stages);
  maniple::print_once("with equal stages and free messages each rank is idle for ", 100 * (p - 1) / (m + p - 1), " %");
}

}  // namespace

int main(int argc, char** argv) try {
  std::string file = "LICENSE", schedule = "1f1b";
  std::size_t pipe = 0, micro_batches = 4, stages = 1, checkpointing = 0, measured = 0;
  std::size_t steps = 300, batch_size = 32, block = 64, width = 128, layers = 4, heads = 4;
  double rate = 3e-3, target = 1e9;
  read_arguments(argc, argv,
                 {{"--text", &file},
                  {"--pipe", &pipe},
                  {"--micro-batches", &micro_batches},
                  {"--schedule", &schedule},
                  {"--stages", &stages},
                  {"--checkpoint", &checkpointing},
                  {"--measure", &measured},
                  {"--steps", &steps},
                  {"--lr", &rate},
                  {"--batch-size", &batch_size},
                  {"--block", &block},
                  {"--width", &width},
                  {"--layers", &layers},
                  {"--heads", &heads},
                  {"--target", &target}});
  if (heads == 0 || width % heads != 0) throw std::invalid_argument("--width must be a multiple of --heads");
  maniple::init_process_group();
  const auto world = maniple::get_default_group();
  const auto number = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  const int ranks = pipe == 0 ? world->size() : static_cast<int>(pipe);
  if (world->size() % ranks != 0) throw std::invalid_argument("the number of ranks must be a multiple of --pipe");
  // Ranks 0 1 | 2 3 are two pipelines; 0 2 and 1 3 have the same stages.
  const auto pipeline_group = world->split(world->rank() / ranks), data_group = world->split(world->rank() % ranks);
  maniple::apply_fast_settings({.threads = 1});
  maniple::seed_all(7);

  nn::Sequential net;
  const auto embed = std::make_shared<Embed>(number(block), number(width));
  net->push_back(embed);
  for (std::size_t i = 0; i < layers; ++i) net->push_back(std::make_shared<Layer>(number(width), number(heads)));
  net->push_back(std::make_shared<Head>(number(width), embed->bytes->weight));
  auto cut = maniple::cut_into_stages(
      net, {.group = pipeline_group,
            .stages_per_rank = stages,
            .sample = torch::zeros({number(std::max<std::size_t>(1, batch_size / micro_batches)), number(block)},
                                   torch::kInt64)});
  maniple::Pipeline pipeline(cut.stages, {.micro_batches = number(micro_batches),
                                          .schedule = schedule_named(schedule),
                                          .loss = loss_of,
                                          .activation_checkpointing = checkpointing != 0,
                                          .group = pipeline_group,
                                          .data_group = data_group->size() > 1 ? data_group : nullptr,
                                          .tied = cut.tied});
  if (measured > 0) {
    measure(pipeline, measured, batch_size, block, micro_batches, ranks, stages);
    return 0;
  }

  maniple::ByteText text(file, {.block_size = block, .stride = 1});
  // All ranks of a pipeline go through the same batches.
  maniple::DistributedSampler sampler(text.size().value(), {.seed = 7, .group = data_group});
  const auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler,
                                                    maniple::per_process_batch_size(batch_size, data_group->size()));
  torch::optim::AdamW optimizer(pipeline.trained_parameters(), torch::optim::AdamWOptions(rate));
  double mean = 0;
  for (std::size_t epoch = 0, step = 0; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      const double loss = pipeline.step(batch.data, batch.target);
      optimizer.step();
      mean = step == 0 ? loss : 0.95 * mean + 0.05 * loss;
      if (++step % 50 == 0 || step == steps) maniple::print_once("step ", step, ": loss ", mean);
      if (step == steps) break;
    }
  }
  return mean < target ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
