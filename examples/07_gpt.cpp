// Trains a small GPT on the bytes of a text with several ranks, then generates some text.
//
//   build/bin/maniple run -n 2 build/bin/examples/07_gpt          the text is LICENSE; about a minute
//
// Options:
//   --text FILE  --steps N  --lr X
//   --batch-size N                 of all ranks together
//   --block N                      context length in bytes
//   --width N  --layers N  --heads N
//   --prompt TEXT  --length N      start and length of the generated text
//   --log FOLDER                   for TensorBoard
//   --target X                     fail if the loss stays above X
//   --device cpu, cuda
//   --backend NAME                 nccl if each rank has a GPU, cuda if ranks share one (docs/gpu.md)
//   --precision float32, bfloat16  of matrix products, through autocast
//   --explain                      print what each rank holds and sends
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

/// Generates text byte by byte, sampled from the network's distribution.
std::string written_by(torch::nn::Sequential& net, std::string text, std::size_t block, std::size_t length,
                       torch::Device device) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < length; ++i) {
    const std::string last = text.substr(text.size() - std::min(text.size(), block));
    const auto input = torch::tensor(std::vector<std::int64_t>(last.begin(), last.end())).bitwise_and(255).unsqueeze(0);
    const auto scores = net->forward(input.to(device))[0][-1];
    text += static_cast<char>((scores / 0.7).softmax(-1).multinomial(1).item<std::int64_t>());
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) try {
  std::string file = "LICENSE", prompt = "The ", log, device_name = "cpu", backend = "native", precision = "float32";
  std::size_t steps = 600, batch_size = 32, block = 64, width = 128, layers = 3, heads = 4, length = 400;
  double rate = 3e-3, target = 1e9;
  bool explain = false;
  read_arguments(argc, argv,
                 {{"--text", &file},
                  {"--prompt", &prompt},
                  {"--length", &length},
                  {"--log", &log},
                  {"--device", &device_name},
                  {"--backend", &backend},
                  {"--precision", &precision},
                  {"--steps", &steps},
                  {"--lr", &rate},
                  {"--batch-size", &batch_size},
                  {"--block", &block},
                  {"--width", &width},
                  {"--layers", &layers},
                  {"--heads", &heads},
                  {"--target", &target},
                  {"--explain", &explain}});
  if (precision != "float32" && precision != "bfloat16")
    throw std::invalid_argument("--precision is float32 or bfloat16, not \"" + precision + "\"");
  maniple::init_process_group({.backend = backend});
  const int rank = maniple::get_rank(), ranks = maniple::get_world_size();
  const auto device = device_named<torch::Device>(device_name, maniple::get_local_rank(), torch::cuda::device_count());
  maniple::apply_fast_settings({.threads = 1});
  maniple::seed_all(7);

  maniple::ByteText text(file, {.block_size = block, .stride = 1});
  maniple::DistributedSampler sampler(text.size().value(), {.seed = 7});
  const auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler,
                                                    maniple::per_process_batch_size(batch_size, ranks));
  const auto number = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  const models::ByteGptOptions sizes{
      .block = number(block), .width = number(width), .layers = number(layers), .heads = number(heads)};
  auto net = models::byte_gpt(sizes);
  net->to(device);
  maniple::DistributedDataParallel ddp(net);
  if (explain) {
    Explanation mine{.holds = "the whole model"};
    mine.count(net->parameters());
    const std::size_t rows = maniple::per_process_batch_size(batch_size, ranks);
    mine.activation_bytes = models::activation_bytes(sizes, 0, number(layers) + 2, number(rows));
    if (ranks > 1) mine.traffic.push_back({"gradients averaged over all ranks, all_reduce", 1, mine.gradient_bytes});
    print_explanations(mine);
  }
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(rate));
  auto& lr = static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr();

  std::optional<maniple::SummaryWriter> curves;
  if (!log.empty()) curves.emplace(log);
  maniple::Metrics metrics;
  maniple::MetricRow row;
  maniple::Progress progress(steps, {.label = "training", .unit = "bytes"});
  for (std::size_t epoch = 0, step = 0; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : maniple::prefetch_to(device, *loader)) {
      const double way = static_cast<double>(step) / static_cast<double>(steps);  // short warm-up, then cosine decay
      lr = rate * std::min(1.0, 20 * way + 0.01) * (0.5 + 0.5 * std::cos(3.1416 * way));
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const maniple::Autocast autocast(device.type(),
                                         {.dtype = torch::kBFloat16, .enabled = precision == "bfloat16"});
        loss = models::byte_loss(ddp.forward(batch.data), batch.target);
      }
      loss.backward();
      metrics.add("norm", maniple::clip_grad_norm_(net->parameters(), 1.0));
      optimizer.step();
      metrics.add("loss", loss, static_cast<double>(batch.data.size(0)));
      if (++step % 20 == 0 || step == steps) {
        row = metrics.all_reduce();  // means of the latest steps over all ranks
        for (const auto& metric : row)
          if (curves) curves->add_scalar(metric.name, metric.value, number(step));
      }
      progress.step(batch.data.numel(), row.text());
      if (step == steps) break;
    }
  }
  progress.finish();
  if (rank == 0) std::printf("%s\n", written_by(net, prompt.empty() ? "\n" : prompt, block, length, device).c_str());
  return row.empty() || row["loss"] < target ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
