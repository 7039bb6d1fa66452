// A small GPT learns the bytes of a text on several ranks, and then writes some of its own.
//
//   build/bin/maniple run -n 2 build/bin/examples/07_gpt          the text is LICENSE; about a minute
//
// --text FILE  --steps N  --batch-size N (all ranks together)  --block N (bytes that it sees)  --width N  --layers N  --heads N
// --lr X  --prompt TEXT, --length N: what it writes  --log FOLDER: for TensorBoard  --target X: fail when the loss stays above
// --device cpu, cuda  --backend NAME: nccl where each rank has a GPU, cuda where ranks share one (docs/gpu.md)
// --precision float32, bfloat16: of matrix products, by autocast
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/maniple.h>

namespace {
namespace nn = torch::nn;

/// Every place looks at itself and the places before it, and then thinks about what it saw.
struct Layer : nn::Module {
  Layer(std::int64_t w, std::int64_t h) : width(w), heads(h) {}
  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), places = x.size(1);
    const auto parts =
        in(norm1(x)).view({batch, places, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});  // query, key, value
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

struct Gpt : nn::Module {
  Gpt(std::int64_t b, std::int64_t w, std::int64_t h, std::size_t depth) : block(b), width(w) {
    for (std::size_t i = 0; i < depth; ++i) layers->push_back(std::make_shared<Layer>(w, h));
  }
  torch::Tensor forward(const torch::Tensor& text) {  // [batch, places] -> [batch, places, 256]: what may come next
    return head(norm(layers->forward(bytes(text) + places(torch::arange(text.size(1), text.device())))));
  }
  /// Byte after byte, each drawn from what the network thinks of it.
  std::string write(std::string text, std::size_t length) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < length; ++i) {
      const std::string last = text.substr(text.size() - std::min(text.size(), static_cast<std::size_t>(block)));
      const auto input =
          torch::tensor(std::vector<std::int64_t>(last.begin(), last.end())).bitwise_and(255).unsqueeze(0);
      text += static_cast<char>(
          (forward(input.to(head->weight.device()))[0][-1] / 0.7).softmax(-1).multinomial(1).item<std::int64_t>());
    }
    return text;
  }
  std::int64_t block, width;
  nn::Embedding bytes = register_module("bytes", nn::Embedding(maniple::ByteText::kVocabulary, width));
  nn::Embedding places = register_module("places", nn::Embedding(block, width));
  nn::Sequential layers = register_module("layers", nn::Sequential());
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
  nn::Linear head = register_module("head", nn::Linear(width, maniple::ByteText::kVocabulary));
};

}  // namespace

int main(int argc, char** argv) try {
  std::string file = "LICENSE", prompt = "The ", log, device_name = "cpu", backend = "native", precision = "float32";
  std::size_t steps = 600, batch_size = 32, block = 64, width = 128, layers = 3, heads = 4, length = 400;
  double rate = 3e-3, target = 1e9;
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
                  {"--target", &target}});
  if (heads == 0 || width % heads != 0) throw std::invalid_argument("--width must be a multiple of --heads");
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
  auto net = std::make_shared<Gpt>(number(block), number(width), number(heads), layers);
  net->to(device);
  maniple::DistributedDataParallel ddp(net);
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
      const double way =
          static_cast<double>(step) / static_cast<double>(steps);  // the rate rises quickly and falls slowly
      lr = rate * std::min(1.0, 20 * way + 0.01) * (0.5 + 0.5 * std::cos(3.1416 * way));
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const maniple::Autocast autocast(device.type(),
                                         {.dtype = torch::kBFloat16, .enabled = precision == "bfloat16"});
        loss = torch::cross_entropy_loss(ddp.forward(batch.data).flatten(0, 1), batch.target.flatten());
      }
      loss.backward();
      metrics.add("norm", maniple::clip_grad_norm_(net->parameters(), 1.0));
      optimizer.step();
      metrics.add("loss", loss, static_cast<double>(batch.data.size(0)));
      if (++step % 20 == 0 || step == steps) {
        row = metrics.all_reduce();  // the means of the latest steps, over all ranks
        for (const auto& metric : row)
          if (curves) curves->add_scalar(metric.name, metric.value, number(step));
      }
      progress.step(batch.data.numel(), row.text());
      if (step == steps) break;
    }
  }
  progress.finish();
  if (rank == 0) std::printf("%s\n", net->write(prompt.empty() ? "\n" : prompt, length).c_str());
  return row.empty() || row["loss"] < target ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
