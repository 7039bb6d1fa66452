// The GPT of 07_gpt divided into stages over ranks: one pipeline, or several in parallel.
//
//   build/bin/maniple run -n 4 build/bin/examples/10_pipeline_gpt --pipe 2      two pipelines of two ranks each; the
//                                                                               text is LICENSE
//   build/bin/maniple run -n 2 build/bin/examples/10_pipeline_gpt --measure 20  does not train: measures the time of
//                                                                               steps and the idle time of ranks
//
// Options:
//   --pipe N              ranks of a pipeline (default: all)
//   --micro-batches N  --schedule gpipe, 1f1b, interleaved
//   --stages N            stages per rank
//   --checkpoint 1        recompute activations in backward
//   --text FILE  --steps N  --lr X
//   --batch-size N        of all pipelines together
//   --block N  --width N  --layers N  --heads N
//   --target X            fail if the loss stays above X
//   --measure N           measure N steps instead of training
//   --explain             print what each rank holds and sends; compare the computed bytes with the bytes sent
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include "explain.h"
#include "models/byte_gpt.h"
#include <maniple/maniple.h>

namespace {

maniple::PipelineSchedule schedule_named(const std::string& name) {
  if (name == "gpipe") return maniple::PipelineSchedule::gpipe;
  if (name == "1f1b") return maniple::PipelineSchedule::one_f_one_b;
  if (name == "interleaved") return maniple::PipelineSchedule::interleaved;
  throw std::invalid_argument("--schedule is \"" + name + "\"; expected gpipe, 1f1b or interleaved");
}

/// This rank's memory, and its traffic for a batch of `rows`. `begins`: the first layer of each stage.
Explanation explanation(const models::ByteGptOptions& sizes, const std::vector<std::size_t>& begins,
                        const maniple::PipelineOptions& options, const maniple::NamedTensors& tied,
                        const maniple::Pipeline& pipeline, std::int64_t rows) {
  Explanation mine;
  mine.count(pipeline.parameters());
  const int rank = options.group->rank(), ranks = options.group->size();
  const int count = static_cast<int>(begins.size()), stages = count / ranks;
  const std::int64_t micro_batches = std::min(options.micro_batches, rows);
  const std::int64_t micro_rows = (rows + micro_batches - 1) / micro_batches;
  // The number of micro-batches whose activations a rank keeps at the same time, summed over its stages.
  std::int64_t kept = micro_batches * stages;
  if (options.schedule != maniple::PipelineSchedule::gpipe) {
    const std::int64_t rounds = std::max<std::int64_t>(1, micro_batches / ranks);
    const std::int64_t round = (micro_batches + rounds - 1) / rounds;
    kept = std::min(kept, stages == 1 ? ranks - rank : 2 * (ranks - rank - 1) + (stages - 1) * round + 1);
  }
  const auto boundary =
      static_cast<std::uint64_t>(rows * sizes.block * sizes.width * 4);  // an activation, or its gradient
  const auto messages = static_cast<std::uint64_t>((rows + micro_rows - 1) / micro_rows);
  const auto& members = options.group->topology().members;
  for (int stage = rank; stage < count; stage += ranks) {
    const auto begin = static_cast<std::int64_t>(begins[static_cast<std::size_t>(stage)]);
    const auto end =
        stage + 1 < count ? static_cast<std::int64_t>(begins[static_cast<std::size_t>(stage) + 1]) : sizes.layers + 2;
    mine.holds += (mine.holds.empty() ? "stage " : ", stage ") + std::to_string(stage) + " (layers " +
                  std::to_string(begin) + " to " + std::to_string(end - 1) + ")";
    const std::uint64_t whole = models::activation_bytes(sizes, begin, end, micro_rows);
    const std::uint64_t input = boundary / messages;
    const auto copies = static_cast<std::uint64_t>(kept);
    mine.activation_bytes += options.activation_checkpointing
                                 ? (copies * input + whole) / static_cast<std::uint64_t>(stages)
                                 : copies * whole / static_cast<std::uint64_t>(stages);
    if (ranks == 1) continue;
    const auto neighbour = [&](int other) {
      return std::to_string(members[static_cast<std::size_t>(other % ranks)].global_rank);
    };
    if (stage + 1 < count) mine.traffic.push_back({"activations to rank " + neighbour(stage + 1), messages, boundary});
    if (stage > 0) mine.traffic.push_back({"gradients to rank " + neighbour(stage - 1), messages, boundary});
  }
  for (const auto& [name, parameter] : tied)
    mine.traffic.push_back({"gradient of the tied " + name + ", all_reduce", 1, parameter.nbytes()});
  if (options.data_group) {
    mine.traffic.push_back(
        {"gradients averaged over " + std::to_string(options.data_group->size()) + " pipelines, all_reduce",
         static_cast<std::uint64_t>(stages), mine.gradient_bytes});
  }
  return mine;
}

/// The bytes for the neighbours in the pipeline.
std::uint64_t bytes_to_neighbours(const Explanation& mine) {
  std::uint64_t bytes = 0;
  for (const Traffic& one : mine.traffic) bytes += one.what.find(" to rank ") != std::string::npos ? one.bytes : 0;
  return bytes;
}

/// Measures steps with one batch, in turn on rank 0 alone and in the pipeline, and each rank's use of time.
void measure(maniple::Pipeline& pipeline, const models::ByteGptOptions& sizes, const maniple::PipelineOptions& options,
             std::size_t steps, std::int64_t batch_size, std::size_t stages) {
  auto alone = models::byte_gpt(sizes);
  const auto data = torch::randint(maniple::ByteText::kVocabulary, {batch_size, sizes.block}, torch::kInt64);
  const auto world = maniple::get_default_group();
  const auto seconds_of = [&](const auto& step) {
    world->barrier();
    const auto begin = std::chrono::steady_clock::now();
    step();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto step_alone = [&] {
    if (world->rank() != 0) return;
    for (const auto& rows : data.chunk(options.micro_batches)) models::byte_loss(alone->forward(rows), rows).backward();
  };
  const auto step = [&] { pipeline.step(data, data); };
  for (int i = 0; i < 3; ++i) seconds_of(step_alone), seconds_of(step);  // warm-up: memory, shapes, connections
  const auto before = pipeline.statistics();
  std::vector<double> alone_s, pipeline_s;
  for (std::size_t i = 0; i < steps; ++i) {
    alone_s.push_back(seconds_of(step_alone));
    pipeline_s.push_back(seconds_of(step));
  }
  auto row = pipeline.statistics();
  row.steps -= before.steps;
  row.step_ms -= before.step_ms;
  row.compute_ms -= before.compute_ms;
  row.cpu_ms -= before.cpu_ms;
  row.wait_ms -= before.wait_ms;
  row.sent_bytes -= before.sent_bytes;
  const auto texts = maniple::gather_object(row.text());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) std::printf("rank %zu: %s\n", rank, texts[rank].c_str());
  const double p = options.group->size(), m = static_cast<double>(options.micro_batches) * static_cast<double>(stages);
  maniple::print_once("with equal stages and free messages each rank is idle for ", 100 * (p - 1) / (m + p - 1), " %");
  const auto best = [](const std::vector<double>& all) { return 1000 * *std::min_element(all.begin(), all.end()); };
  maniple::print_once("best step: ", best(alone_s), " ms on one rank, ", best(pipeline_s),
                      " ms in the pipeline: ", best(alone_s) / best(pipeline_s), " times as fast");
}

}  // namespace

int main(int argc, char** argv) try {
  std::string file = "LICENSE", schedule = "1f1b";
  std::size_t pipe = 0, micro_batches = 4, stages = 1, checkpointing = 0, measured = 0;
  std::size_t steps = 300, batch_size = 32, block = 64, width = 128, layers = 4, heads = 4;
  double rate = 3e-3, target = 1e9;
  bool explain = false;
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
                  {"--target", &target},
                  {"--explain", &explain}});
  maniple::init_process_group();
  const auto world = maniple::get_default_group();
  const auto number = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  const int ranks = pipe == 0 ? world->size() : static_cast<int>(pipe);
  if (world->size() % ranks != 0) throw std::invalid_argument("the number of ranks must be a multiple of --pipe");
  // With 4 ranks and --pipe 2, ranks 0 1 and 2 3 are pipelines; ranks 0 2 and 1 3 have the same stages.
  const auto mesh = maniple::init_device_mesh({{"data", -1}, {"pipe", ranks}});
  const auto pipeline_group = mesh["pipe"], data_group = mesh["data"];
  maniple::apply_fast_settings({.threads = 1});
  maniple::seed_all(7);

  const auto rows = number(maniple::per_process_batch_size(batch_size, data_group->size()));
  // The head and the embedding share their weight (tied), although they are on different ranks.
  const models::ByteGptOptions sizes{
      .block = number(block), .width = number(width), .layers = number(layers), .heads = number(heads), .tied = true};
  auto cut = maniple::cut_into_stages(
      models::byte_gpt(sizes),
      {.group = pipeline_group,
       .stages_per_rank = stages,
       .sample =
           torch::zeros({std::max<std::int64_t>(1, rows / number(micro_batches)), number(block)}, torch::kInt64)});
  const maniple::PipelineOptions options{.micro_batches = number(micro_batches),
                                         .schedule = schedule_named(schedule),
                                         .loss = models::byte_loss,
                                         .activation_checkpointing = checkpointing != 0,
                                         .group = pipeline_group,
                                         .data_group = data_group->size() > 1 ? data_group : nullptr,
                                         .tied = cut.tied};
  maniple::Pipeline pipeline(cut.stages, options);
  if (explain) print_explanations(explanation(sizes, cut.begins, options, cut.tied, pipeline, rows));
  if (measured > 0) {
    measure(pipeline, sizes, options, measured, rows, stages);
    return 0;
  }

  maniple::ByteText text(file, {.block_size = block, .stride = 1});
  // All ranks of a pipeline use the same batches.
  maniple::DistributedSampler sampler(text.size().value(), {.seed = 7, .group = data_group});
  const auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler,
                                                    static_cast<std::size_t>(rows));
  torch::optim::AdamW optimizer(pipeline.trained_parameters(), torch::optim::AdamWOptions(rate));
  double mean = 0;
  for (std::size_t epoch = 0, step = 0; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      const std::uint64_t sent = pipeline.statistics().sent_bytes;
      const double loss = pipeline.step(batch.data, batch.target);
      if (explain) {
        require_as_explained(
            "activations and gradients",
            bytes_to_neighbours(explanation(sizes, cut.begins, options, cut.tied, pipeline, batch.data.size(0))),
            pipeline.statistics().sent_bytes - sent);
      }
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
