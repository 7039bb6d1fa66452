// `maniple bench data`, `weights` and `activations`: the work around a training step, each as a ratio to its limit.
//
//   train_worker KIND SECONDS [MODELS]      prints a table, and each of its rows as a JSON object
//
// data          Compares DataLoader, with a decode function of known cost, with the slowest stage alone: either one
//               thread per worker that only decodes, or a loop that only computes. Blocks of both alternate, and the
//               median of their ratios counts. On a busy machine the processor time per sample gives the same ratio:
//               the time for decoding alone divided by the workers' time.
// weights       Compares load_weights of a safetensors file in the disk cache with read() of the same bytes into the
//               same memory, and reports the memory needed beyond the model. MODELS: file sizes, 2G by default. The
//               file is written to TMPDIR, or /tmp.
// activations   Forward and backward of a GPT-2 of 16 layers in 1, 2, 4, ... recomputed parts
//               (activation_checkpoint.h): peak memory above parameters and gradients, and processor time.
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/torch.h>

#include "examples/models/gpt2.h"
#include <maniple/train/activation_checkpoint.h>
#include <maniple/train/data_loader.h>
#include <maniple/train/weights.h>

namespace {

using Clock = std::chrono::steady_clock;
using torch::Tensor;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double processor_seconds(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// A number of kB in /proc/self/status, as bytes.
double status_bytes(const char* name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name)) return std::atof(line.c_str() + std::strlen(name) + 1) * 1024;
  }
  return 0;
}

/// Resets VmHWM. False: the system does not allow it.
bool reset_peak() { return static_cast<bool>(std::ofstream("/proc/self/clear_refs") << "5" << std::flush); }

// ---- data -----------------------------------------------------------------------------------------------------------

constexpr std::size_t kBatch = 32;
constexpr std::int64_t kSide = 64;

/// Computes for about `microseconds`; the result depends on the whole computation.
float burn(int microseconds) {
  static const double rounds_per_us = [] {
    const auto begin = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
    volatile float sink = 0;
    float x = 0.5F;
    for (int i = 0; i < 2'000'000; ++i) x = x * 1.0001F + 0.001F - static_cast<float>(x > 10) * 9;
    sink = x;
    static_cast<void>(sink);
    return 2'000'000 / ((processor_seconds(CLOCK_THREAD_CPUTIME_ID) - begin) * 1e6);
  }();
  float x = 0.5F;
  const auto rounds = static_cast<long>(rounds_per_us * microseconds);
  for (long i = 0; i < rounds; ++i) x = x * 1.0001F + 0.001F - static_cast<float>(x > 10) * 9;
  return x;
}

/// Pictures of 3 x 64 x 64 floats that take `microseconds` to decode.
struct Pictures {
  torch::data::Example<> get(std::size_t index) const {
    return {torch::full({3, kSide, kSide}, burn(microseconds)), torch::full({}, static_cast<std::int64_t>(index))};
  }
  std::size_t size() const { return count; }
  std::size_t count = 0;
  int microseconds = 0;
};

struct Taken {
  double seconds = 0;  ///< for all samples
  double cpu = 0;      ///< processor time of the measured stage per sample
};

/// Decodes the samples in one thread per worker.
Taken decode_alone(const Pictures& pictures, std::size_t workers) {
  const auto begin = Clock::now();
  const double cpu = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
  std::vector<std::thread> threads;
  for (std::size_t w = 0; w < workers; ++w) {
    threads.emplace_back([&pictures, w, workers] {
      for (std::size_t i = w; i < pictures.size(); i += workers) pictures.get(i);
    });
  }
  for (auto& thread : threads) thread.join();
  return {seconds_since(begin),
          (processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / static_cast<double>(pictures.size())};
}

Taken loop_alone(std::size_t batches, int step_us) {
  const auto begin = Clock::now();
  const double cpu = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
  volatile float sink = 0;
  for (std::size_t i = 0; i < batches; ++i) sink = burn(step_us);
  static_cast<void>(sink);
  return {seconds_since(begin),
          (processor_seconds(CLOCK_THREAD_CPUTIME_ID) - cpu) / static_cast<double>(batches * kBatch)};
}

Taken with_loader(const Pictures& pictures, std::size_t workers, int step_us) {
  maniple::DataLoader loader(pictures, {.batch_size = kBatch, .workers = workers, .shuffle = false});
  const auto begin = Clock::now();
  const double all = processor_seconds(CLOCK_PROCESS_CPUTIME_ID), own = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
  volatile float sink = 0;
  for ([[maybe_unused]] auto& batch : loader)
    if (step_us > 0) sink = burn(step_us);
  static_cast<void>(sink);
  const double loop = processor_seconds(CLOCK_THREAD_CPUTIME_ID) - own;
  const double workers_cpu = processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - all - loop;
  return {seconds_since(begin), (step_us > 0 ? loop : workers_cpu) / static_cast<double>(pictures.size())};
}

void measure_data(double seconds) {
  burn(1);  // calibrates
  std::printf("%-8s %8s %10s %14s %14s %8s %10s\n", "slowest", "workers", "sample_us", "alone_per_s", "loader_per_s",
              "ratio", "cpu_ratio");
  struct Case {
    const char* slowest;
    std::size_t workers;
    int decode_us, step_us;  ///< per sample; per batch (0: the loop does not compute)
  };
  constexpr int kSlowStep = 200 * static_cast<int>(kBatch);  // four times a worker's
  for (const Case& one : {Case{"decode", 1, 200, 0}, Case{"decode", 2, 200, 0}, Case{"decode", 1, 1000, 0},
                          Case{"decode", 2, 1000, 0}, Case{"loop", 1, 50, kSlowStep}}) {
    const double sample_us = one.step_us > 0 ? static_cast<double>(one.step_us) / kBatch : one.decode_us;
    const auto batches = static_cast<std::size_t>(0.4e6 * static_cast<double>(one.step_us > 0 ? 1 : one.workers) /
                                                  (sample_us * kBatch)) +
                         1;
    const Pictures pictures{batches * kBatch, one.decode_us};
    std::vector<double> ratios, cpu_ratios, alone_rates, loader_rates;
    const auto start = Clock::now();
    while (ratios.size() < 5 || seconds_since(start) < seconds) {
      const Taken alone = one.step_us > 0 ? loop_alone(batches, one.step_us) : decode_alone(pictures, one.workers);
      const Taken loader = with_loader(pictures, one.workers, one.step_us);
      ratios.push_back(alone.seconds / loader.seconds);
      cpu_ratios.push_back(alone.cpu / loader.cpu);
      alone_rates.push_back(static_cast<double>(pictures.size()) / alone.seconds);
      loader_rates.push_back(static_cast<double>(pictures.size()) / loader.seconds);
    }
    std::printf("%-8s %8zu %10.0f %14.0f %14.0f %8.3f %10.3f\n", one.slowest, one.workers, sample_us,
                median(alone_rates), median(loader_rates), median(ratios), median(cpu_ratios));
    std::printf(
        "{\"slowest\": \"%s\", \"workers\": %zu, \"sample_us\": %.0f, \"alone_per_s\": %.1f, \"loader_per_s\": %.1f, "
        "\"ratio\": %.4f, \"cpu_ratio\": %.4f}\n",
        one.slowest, one.workers, sample_us, median(alone_rates), median(loader_rates), median(ratios),
        median(cpu_ratios));
    std::fflush(stdout);
  }
}

// ---- weights --------------------------------------------------------------------------------------------------------

/// A temporary folder, removed with its file on destruction.
struct Scratch {
  Scratch() {
    const char* temporary = std::getenv("TMPDIR");
    path = std::string(temporary != nullptr && *temporary != 0 ? temporary : "/tmp") + "/maniple-bench-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr)
      throw std::runtime_error("cannot make a folder " + path + ": " + std::strerror(errno));
    file = path + "/model.safetensors";
  }
  ~Scratch() {
    ::unlink(file.c_str());
    ::rmdir(path.c_str());
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string path, file;
};

std::int64_t bytes_of(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const double factor = unit == "K" ? 1 << 10 : unit == "M" ? 1 << 20 : unit == "G" ? 1 << 30 : unit.empty() ? 1 : 0;
  if (end == text.c_str() || factor == 0 || number * factor < 1 << 20)
    throw std::invalid_argument("--models holds \"" + text + "\"; of weights it is sizes of at least 1M: 64M,2G");
  return static_cast<std::int64_t>(number * factor);
}

/// Reads the whole file into the tensors, one after the other, with read().
double read_file(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& model) {
  const auto begin = Clock::now();
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error("cannot open " + path + ": " + std::strerror(errno));
  for (const auto& [name, tensor] : model) {
    auto* to = static_cast<char*>(tensor.data_ptr());
    for (std::size_t left = tensor.nbytes(); left > 0;) {
      const ssize_t count = ::read(file, to, std::min<std::size_t>(left, 8 << 20));
      if (count <= 0) {
        ::close(file);
        throw std::runtime_error("cannot read " + path);
      }
      to += count, left -= static_cast<std::size_t>(count);
    }
  }
  ::close(file);
  return seconds_since(begin);
}

void measure_weights(double seconds, const std::string& sizes) {
  std::printf("%-8s %10s %12s %8s %14s\n", "bytes", "read_GB/s", "load_GB/s", "ratio", "extra_memory");
  for (std::size_t at = 0; at <= sizes.size();) {
    const std::size_t comma = std::min(sizes.find(',', at), sizes.size());
    const std::string size = sizes.substr(at, comma - at);
    at = comma + 1;
    const std::int64_t bytes = bytes_of(size);
    const std::int64_t tensors = std::max<std::int64_t>(1, bytes / (64 << 20));
    std::vector<std::pair<std::string, Tensor>> model;
    for (std::int64_t i = 0; i < tensors; ++i)
      model.emplace_back("layers." + std::to_string(i), torch::full({bytes / tensors / 4}, static_cast<double>(i)));
    const Scratch scratch;
    const std::string& path = scratch.file;
    maniple::save_weights(model, path);
    read_file(path, model);  // into the cache
    const double before = status_bytes("VmRSS:");
    const bool has_peak = reset_peak();
    maniple::load_weights(model, path);
    const double extra = (status_bytes("VmHWM:") - before) / static_cast<double>(bytes);
    for (std::int64_t i = 0; i < tensors; ++i) {
      const auto& tensor = model[static_cast<std::size_t>(i)].second;
      if (tensor[0].item<double>() != static_cast<double>(i) || tensor[-1].item<double>() != static_cast<double>(i))
        throw std::runtime_error("load_weights: layers." + std::to_string(i) + " is not what was saved");
    }
    std::vector<double> reads, loads, ratios;
    const auto start = Clock::now();
    while (ratios.size() < 5 || seconds_since(start) < seconds) {
      reads.push_back(read_file(path, model));
      const auto begin = Clock::now();
      maniple::load_weights(model, path);
      loads.push_back(seconds_since(begin));
      ratios.push_back(reads.back() / loads.back());
    }
    const double gigabytes = static_cast<double>(bytes) * 1e-9;
    char memory[32] = "unknown";
    if (has_peak) std::snprintf(memory, sizeof(memory), "%.2f %%", std::max(0.0, extra) * 100);
    std::printf("%-8s %10.2f %12.2f %8.3f %14s\n", size.c_str(), gigabytes / median(reads), gigabytes / median(loads),
                median(ratios), memory);
    std::printf("{\"bytes\": %lld, \"read_s\": %.4f, \"load_s\": %.4f, \"ratio\": %.4f, \"extra_memory\": ",
                static_cast<long long>(bytes), median(reads), median(loads), median(ratios));
    std::printf(has_peak ? "%.5f}\n" : "null}\n", std::max(0.0, extra));
    std::fflush(stdout);
  }
}

// ---- activations ----------------------------------------------------------------------------------------------------

constexpr std::int64_t kLayers = 16, kTokens = 64, kTexts = 16;

/// Runs forward and backward with the layers in `parts` parts. All but the last are recomputed; backward begins with
/// the last.
void train(models::Gpt2& net, const Tensor& ids, std::int64_t parts) {
  auto& inside = *net->transformer;
  Tensor x = inside.wte(ids) + inside.wpe(torch::arange(kTokens));
  const std::int64_t size = kLayers / parts;
  for (std::int64_t part = 0; part < parts; ++part) {
    const auto run = [&inside, part, size](Tensor y) {
      for (std::int64_t i = part * size; i < (part + 1) * size; ++i)
        y = inside.h->ptr<models::gpt2::BlockImpl>(static_cast<std::size_t>(i))->forward(y);
      return y;
    };
    x = part + 1 < parts ? maniple::checkpoint(run, x) : run(x);
  }
  const Tensor logits = torch::linear(inside.ln_f(x), inside.wte->weight);
  torch::cross_entropy_loss(logits.view({-1, logits.size(2)}), ids.view({-1})).backward();
}

void measure_activations(double seconds) {
  at::set_num_threads(1);  // so that processor time equals the computation's time
  models::Gpt2 net(models::Gpt2Options{
      .vocabulary = 256, .positions = kTokens, .width = 128, .layers = kLayers, .heads = 4, .dropout = 0.1});
  const Tensor ids = torch::arange(kTexts * kTokens).remainder(251).view({kTexts, kTokens});
  const std::vector<std::int64_t> all_parts = {1, 2, 4, 8, 16};
  std::vector<std::vector<double>> times(all_parts.size());
  train(net, ids, 1);  // creates the gradients
  const auto start = Clock::now();
  while (times.front().size() < 5 || seconds_since(start) < seconds) {
    for (std::size_t i = 0; i < all_parts.size(); ++i) {
      const double begin = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
      train(net, ids, all_parts[i]);
      times[i].push_back(processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - begin);
    }
  }
  // From here on freed memory returns to the system at once, so that the peak is the memory in use.
  ::mallopt(M_MMAP_THRESHOLD, 16 << 10);
  ::mallopt(M_MMAP_MAX, 1 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 0);
  ::malloc_trim(0);
  std::printf("%6s %12s %8s %10s %8s\n", "parts", "memory_MiB", "memory", "cpu_ms", "time");
  double memory_without = 0;
  for (std::size_t i = 0; i < all_parts.size(); ++i) {
    train(net, ids, all_parts[i]);
    ::malloc_trim(0);
    const double before = status_bytes("VmRSS:");
    const bool has_peak = reset_peak();
    train(net, ids, all_parts[i]);
    const double memory = has_peak ? (status_bytes("VmHWM:") - before) / (1 << 20) : 0;
    if (i == 0) memory_without = memory;
    std::vector<double> ratios;
    for (std::size_t round = 0; round < times[i].size(); ++round) ratios.push_back(times[i][round] / times[0][round]);
    const double part_of = memory_without > 0 ? memory / memory_without : 0;
    std::printf("%6lld %12.1f %8.3f %10.1f %8.3f\n", static_cast<long long>(all_parts[i]), memory, part_of,
                median(times[i]) * 1e3, median(ratios));
    std::printf("{\"parts\": %lld, \"memory_mib\": %.2f, \"memory\": %.4f, \"cpu_ms\": %.3f, \"time\": %.4f}\n",
                static_cast<long long>(all_parts[i]), memory, part_of, median(times[i]) * 1e3, median(ratios));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string kind = argc > 2 ? argv[1] : "";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0;
  if (kind == "data") {
    measure_data(seconds);
  } else if (kind == "weights") {
    measure_weights(seconds, argc > 3 ? argv[3] : "2G");
  } else if (kind == "activations") {
    measure_activations(seconds);
  } else {
    std::fprintf(stderr,
                 "usage: train_worker data|weights|activations SECONDS [MODELS]; `maniple bench data` starts it\n");
    return 2;
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
