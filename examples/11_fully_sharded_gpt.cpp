// The GPT of 07_gpt, fully sharded: every rank holds a part of each parameter, of its gradient and of AdamW's state.
//
//   build/bin/maniple run -n 4 build/bin/examples/11_fully_sharded_gpt --explain     prints memory and traffic, then
//                                                                                    trains; the text is LICENSE
//   build/bin/maniple run -n 4 build/bin/examples/11_fully_sharded_gpt --measure 20    does not train: compares steps
//                                                                                      and memory with DDP
//
// Options:
//   --explain                       print each rank's memory and traffic before training
//   --measure N                     measure N steps, in turn with DistributedDataParallel
//   --zero 3, 2                     2: parameters stay gathered between forward and backward
//   --overlap automatic, none, thread
//   --precision float32, bfloat16
//   --checkpoint FOLDER             save at the end, and continue from there with any number of ranks
//   --text FILE  --steps N  --lr X
//   --batch-size N                  of all ranks together
//   --block N  --width N  --layers N  --heads N
//   --target X                      fail if the loss stays above X
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <optional>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include "models/byte_gpt.h"
#include <maniple/maniple.h>

namespace {

/// Each layer is a unit; the embedding and the head belong to the root. No rank ever gathers more than one layer.
maniple::FullySharded<torch::nn::Sequential> sharded_gpt(const models::ByteGptOptions& gpt,
                                                         const maniple::FullyShardOptions& options) {
  return maniple::fully_shard(
      [&] {
        torch::nn::Sequential net;
        net->push_back(models::GptEmbedding(gpt));
        for (std::int64_t i = 0; i < gpt.layers; ++i)
          net->push_back(maniple::fully_shard([&] { return models::GptLayer(gpt); }, options));
        net->push_back(models::GptHead(gpt.width));
        return net;
      },
      options);
}

// ---- This process's memory in bytes, as reported by Linux -----------------------------------------------------------

double memory_line(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(name + ":", 0) == 0) return 1024 * std::stod(line.substr(name.size() + 1));
  return 0;
}
double memory_now() { return memory_line("RssAnon"); }
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }
/// Excludes the memory that ranks share, which only grows.
double memory_peak() { return memory_line("VmHWM") - memory_line("RssShmem") - memory_line("RssFile"); }

/// The peak of the additional memory that `body` needs.
double memory_of(const std::function<void()>& body) {
  body();
  forget_peak();
  const double before = memory_now();
  body();
  return std::max(0.0, memory_peak() - before);
}

/// The activations of a step on this rank, measured with one layer and with the head separately. Excludes the gradients
/// of weights.
double activation_bytes(const models::ByteGptOptions& gpt, const torch::Tensor& text) {
  const auto x = torch::randn({text.size(0), text.size(1), gpt.width}).requires_grad_();
  const auto at_most = [&](torch::nn::Module& module, const std::function<torch::Tensor()>& loss) {
    double weights = 0;
    for (const auto& parameter : module.parameters()) weights += static_cast<double>(parameter.nbytes());
    const double bytes = memory_of([&] {
      loss().backward();
      for (auto& parameter : module.parameters()) parameter.mutable_grad() = torch::Tensor();
    });
    return std::max(0.0, bytes - weights);
  };
  models::GptLayer layer(gpt);
  models::GptHead head(gpt.width);
  const double computing = at_most(*layer, [&] { return layer(x).sum(); });
  const double loss = at_most(*head, [&] { return models::byte_loss(head(x), text); });
  const double before = memory_now();
  const auto y = layer(x);
  const double kept = memory_now() - before;
  // The ranks differ only by spare memory in their heaps: the maximum counts.
  auto bytes =
      torch::full({1}, static_cast<double>(gpt.layers - 1) * kept + std::max(computing, kept + loss), torch::kFloat64);
  maniple::all_reduce(bytes, maniple::ReduceOp::max);
  return bytes.item<double>();
}

void explain(torch::nn::Module& net, double activations) {
  const auto summary = maniple::fully_sharded_summary(net);
  const double mine = static_cast<double>(summary.peak_bytes());
  char line[200];
  std::snprintf(line, sizeof line, "  with AdamW's state %.2f MB, with activations of %.2f MB %.2f MB at most\n",
                mine / 1e6, activations / 1e6, (mine + activations) / 1e6);
  const auto texts = maniple::gather_object(summary.text() + line);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) std::printf("rank %zu: %s", rank, texts[rank].c_str());
  std::fflush(stdout);
}

struct Timing {
  double best = 1e9, sum = 0;
  void add(double ms) { best = std::min(best, ms), sum += ms; }
};
template <class Body>
double milliseconds(const Body& body) {
  maniple::barrier();
  const auto start = std::chrono::steady_clock::now();
  body();
  maniple::barrier();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void measure(std::size_t steps, const models::ByteGptOptions& gpt, const maniple::FullyShardOptions& options,
             const torch::Tensor& text) {
  const double activations = activation_bytes(gpt, text), before = memory_now();
  auto net = sharded_gpt(gpt, options);
  maniple::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto step = [&] {
    optimizer.zero_grad();
    models::byte_loss(net(text), text).backward();
    optimizer.step();
  };
  const auto summary = maniple::fully_sharded_summary(*net);
  for (int i = 0; i < 3; ++i) step();
  forget_peak();
  for (int i = 0; i < 3; ++i) step();
  const double peak = memory_peak() - before + static_cast<double>(summary.scratch_bytes);
  const double formula = static_cast<double>(summary.peak_bytes()) + activations;
  char line[200];
  std::snprintf(line, sizeof line, "peak memory %.2f MB, by the formula %.2f MB: %.3f of it", peak / 1e6, formula / 1e6,
                peak / formula);
  const auto texts = maniple::gather_object(std::string(line));
  for (std::size_t rank = 0; rank < texts.size(); ++rank) std::printf("rank %zu: %s\n", rank, texts[rank].c_str());

  auto whole = models::byte_gpt(gpt);
  maniple::DistributedDataParallel ddp(whole);
  maniple::optim::AdamW theirs(whole->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto ddp_step = [&] {
    theirs.zero_grad();
    models::byte_loss(ddp(text), text).backward();
    theirs.step();
  };
  for (int i = 0; i < 3; ++i) ddp_step();
  Timing ours, other;
  for (std::size_t i = 0; i < steps; ++i) {
    ours.add(milliseconds(step));
    other.add(milliseconds(ddp_step));
  }
  const auto n = static_cast<double>(steps);
  std::snprintf(line, sizeof line,
                "a step: fully sharded %.2f ms (mean %.2f), DDP %.2f ms (mean %.2f): %.3f of it (%.3f)", ours.best,
                ours.sum / n, other.best, other.sum / n, ours.best / other.best, ours.sum / other.sum);
  maniple::print_once(line);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string file = "LICENSE", overlap = "automatic", precision = "float32", folder;
  bool explains = false;
  std::size_t measured = 0, zero = 3;
  std::size_t steps = 300, batch_size = 32, block = 64, width = 128, layers = 4, heads = 4;
  double rate = 3e-3, target = 1e9;
  read_arguments(argc, argv,
                 {{"--text", &file},
                  {"--explain", &explains},
                  {"--measure", &measured},
                  {"--zero", &zero},
                  {"--overlap", &overlap},
                  {"--precision", &precision},
                  {"--checkpoint", &folder},
                  {"--steps", &steps},
                  {"--lr", &rate},
                  {"--batch-size", &batch_size},
                  {"--block", &block},
                  {"--width", &width},
                  {"--layers", &layers},
                  {"--heads", &heads},
                  {"--target", &target}});
  if (heads == 0 || width % heads != 0) throw std::invalid_argument("--width must be a multiple of --heads");
  if (zero != 2 && zero != 3) throw std::invalid_argument("--zero is 2 or 3");
  maniple::FullyShardOptions options;
  if (zero == 2) options.reshard_after_forward = false;
  if (overlap == "none") options.overlap = maniple::Overlap::none;
  if (overlap == "thread") options.overlap = maniple::Overlap::thread;
  if (precision == "bfloat16")
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
  maniple::init_process_group();
  const int ranks = maniple::get_world_size();
  maniple::apply_fast_settings({.threads = 1});
  maniple::seed_all(7);
  const auto number = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  const models::ByteGptOptions gpt{
      .block = number(block), .width = number(width), .layers = number(layers), .heads = number(heads)};
  const auto rows = maniple::per_process_batch_size(batch_size, ranks);
  if (explains || measured > 0) mallopt(M_MMAP_THRESHOLD, 1 << 16);  // return freed memory, so that it is not counted
  const auto sample = torch::randint(maniple::ByteText::kVocabulary, {number(rows), number(block)}, torch::kInt64);
  if (measured > 0) {
    measure(measured, gpt, options, sample);
    return 0;
  }

  const double activations = explains ? activation_bytes(gpt, sample) : 0;
  auto net = sharded_gpt(gpt, options);
  if (explains) explain(*net, activations);
  maniple::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(rate));
  std::optional<maniple::Checkpoint> checkpoint;
  std::size_t step = 0;
  if (!folder.empty()) {
    checkpoint.emplace(maniple::CheckpointOptions{.folder = folder, .sharded = true});
    checkpoint->add("model", *net).add("optimizer", optimizer);
    step = static_cast<std::size_t>(checkpoint->load().value_or(0));
  }
  maniple::ByteText text(file, {.block_size = block, .stride = 1});
  maniple::DistributedSampler sampler(text.size().value(), {.seed = 7});
  const auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler, rows);
  maniple::Metrics metrics;
  double loss = 0;
  for (std::size_t epoch = step; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      const auto value = models::byte_loss(net(batch.data).to(torch::kFloat32), batch.target);
      value.backward();
      maniple::clip_grad_norm_(*net, 1.0);
      optimizer.step();
      metrics.add("loss", value);
      if (++step % 50 == 0 || step == steps) {
        loss = metrics.all_reduce()["loss"];
        maniple::print_once("step ", step, ": loss ", loss);
      }
      if (step == steps) break;
    }
  }
  if (checkpoint) checkpoint->save(number(step));
  return loss < target ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
