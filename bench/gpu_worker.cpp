// One rank of the collectives in `maniple bench gpu`: all_reduce of float32 in GPU memory, through the public API.
//
//   gpu_worker BACKEND SIZES ROUNDS MILLISECONDS       BACKEND: cuda, nccl, native; started by `maniple run`
//
// Operations are enqueued back to back on one stream, and the host waits once at the end; the time per operation is
// reported. A round measures each variant in turn (registered and ordinary memory; with nccl also NCCL's own calls,
// without Maniple), so that all find the GPU in the same state. Medians over the rounds of the slowest rank count. Rank
// 0 prints one JSON object per line.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/bench/work_item.h"
#include <maniple/comm.h>
#ifdef MANIPLE_BENCH_NCCL
#include "plugins/nccl/nccl_library.h"
#endif

namespace maniple::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kChecked = 4096;        // elements checked at each end of the result
constexpr std::uint64_t kMaxCalls = 500;      // per round, because a stream's queue is limited
constexpr std::uint64_t kSlowNs = 5'000'000;  // slower calls are measured one at a time, in three rounds

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(code)));
}

std::uint64_t nanoseconds_since(Clock::time_point start) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
}

/// A rank's input at an index, and the expected sum over all ranks.
float input(int rank, std::size_t index) { return static_cast<float>(index % 13 + static_cast<std::size_t>(rank) + 1); }
float sum(int ranks, std::size_t index) {
  return static_cast<float>(ranks) * static_cast<float>(index % 13) + static_cast<float>(ranks * (ranks + 1) / 2);
}

/// One way to reduce: a system and a kind of memory.
struct Variant {
  std::string system, kind;
  float* in = nullptr;
  float* out = nullptr;  ///< may be `in`
  std::function<void(float* in, float* out, std::size_t count)> call = {};
};

/// The samples of one variant and size.
struct Samples {
  std::vector<double> each_us, enqueue_us;
};

class Worker {
 public:
  Worker(std::shared_ptr<ProcessGroup> group, std::size_t bytes) : group_(std::move(group)), bytes_(bytes) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }

  int rank() const { return group_->rank(); }
  int ranks() const { return group_->size(); }
  cudaStream_t stream() const { return stream_; }
  ProcessGroup& group() { return *group_; }
  std::vector<Variant>& variants() { return variants_; }

  float* ordinary() const {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes_), "cudaMalloc");
    return static_cast<float*>(memory);  // until the process ends
  }
  float* registered() {
    memory_.push_back(group_->allocate(bytes_, Device::cuda(0)));
    return static_cast<float*>(memory_.back().data());
  }

  /// Collective: returns the maximum over all ranks.
  std::uint64_t largest(std::uint64_t value) {
    auto number = static_cast<std::int64_t>(value);
    group_->all_reduce(buffer_of(number), ReduceOp::max);
    return static_cast<std::uint64_t>(number);
  }

  void all_reduce(float* in, float* out, std::size_t count) {
    const Buffer result{out, count, DType::float32, Device::cuda(0)};
    CallOptions options;
    options.stream = stream_;
    if (in == out) {
      group_->all_reduce(result, ReduceOp::sum, options);
    } else {
      group_->all_reduce(ConstBuffer{in, count, DType::float32, Device::cuda(0)}, result, ReduceOp::sum, options);
    }
  }

  void measure(std::uint64_t bytes, int rounds, double milliseconds) {
    const std::size_t count = std::max<std::size_t>(1, bytes / sizeof(float));
    std::vector<std::uint64_t> calls;
    for (const Variant& variant : variants_) {
      verify(variant, count);
      calls.push_back(calls_of(variant, count, milliseconds));
    }
    std::vector<Samples> samples(variants_.size());
    for (int round = 0; round < rounds; ++round) {
      for (std::size_t i = 0; i < variants_.size(); ++i) {
        if (calls[i] == 1 && round > 2) continue;
        time(variants_[i], count, calls[i], &samples[i]);
      }
    }
    for (std::size_t i = 0; i < variants_.size() && rank() == 0; ++i) {
      const nlohmann::ordered_json row = {{"case", "all_reduce"},
                                          {"system", variants_[i].system},
                                          {"kind", variants_[i].kind},
                                          {"ranks", ranks()},
                                          {"bytes", count * sizeof(float)},
                                          {"us", median(samples[i].each_us)},
                                          {"enqueue_us", median(samples[i].enqueue_us)}};
      std::printf("%s\n", row.dump().c_str());
      std::fflush(stdout);
    }
  }

 private:
  void wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  /// Makes one call with known inputs and checks both ends of the result. Leaves zeros, whose sums stay zeros.
  void verify(const Variant& variant, std::size_t count) {
    const std::size_t part = std::min(count, kChecked);
    std::vector<float> values(part);
    for (const std::size_t first : {std::size_t{0}, count - part}) {
      for (std::size_t i = 0; i < part; ++i) values[i] = input(rank(), first + i);
      check(cudaMemcpy(variant.in + first, values.data(), part * sizeof(float), cudaMemcpyDefault), "cudaMemcpy");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    largest(0);
    variant.call(variant.in, variant.out, count);
    wait();
    for (const std::size_t first : {std::size_t{0}, count - part}) {
      check(cudaMemcpy(values.data(), variant.out + first, part * sizeof(float), cudaMemcpyDefault), "cudaMemcpy");
      for (std::size_t i = 0; i < part; ++i) {
        if (values[i] == sum(ranks(), first + i)) continue;
        throw std::runtime_error(fmt::format("{}, {} memory, {} B: element {} is {}, but the sum is {}", variant.system,
                                             variant.kind, count * sizeof(float), first + i, values[i],
                                             sum(ranks(), first + i)));
      }
    }
    largest(0);  // do not clear memory that another rank still reads
    for (float* memory : {variant.in, variant.out}) check(cudaMemset(memory, 0, count * sizeof(float)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    largest(0);
  }

  /// The slowest rank's nanoseconds per call.
  double time(const Variant& variant, std::size_t count, std::uint64_t calls, Samples* samples) {
    largest(0);
    const auto start = Clock::now();
    for (std::uint64_t i = 0; i < calls; ++i) variant.call(variant.in, variant.out, count);
    const double enqueued = static_cast<double>(nanoseconds_since(start)) / static_cast<double>(calls);
    wait();
    const double each = static_cast<double>(largest(nanoseconds_since(start))) / static_cast<double>(calls);
    if (samples != nullptr) {
      samples->each_us.push_back(each / 1e3);
      samples->enqueue_us.push_back(enqueued / 1e3);
    }
    return each;
  }

  std::uint64_t calls_of(const Variant& variant, std::size_t count, double milliseconds) {
    time(variant, count, 1, nullptr);
    double each = time(variant, count, 1, nullptr);
    if (each > kSlowNs) return 1;
    each = time(variant, count, 10, nullptr);
    const auto fitting = static_cast<std::uint64_t>(milliseconds * 1e6 / std::max(each, 1.0));
    return std::clamp<std::uint64_t>(fitting, 2, kMaxCalls);
  }

  std::shared_ptr<ProcessGroup> group_;
  std::size_t bytes_;
  cudaStream_t stream_ = nullptr;
  std::vector<RegisteredMemory> memory_;
  std::vector<Variant> variants_;
};

#ifdef MANIPLE_BENCH_NCCL
void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw std::runtime_error(fmt::format("{}: {}", call, nccl_plugin::describe(result)));
}

/// A plain NCCL communicator over the same ranks, kept until the process ends.
std::function<void(float*, float*, std::size_t)> bare_nccl(Worker& worker) {
  const nccl_plugin::NcclLibrary& library = nccl_plugin::nccl();
  if (!library.missing.empty()) throw std::runtime_error(library.missing);
  ncclUniqueId id{};
  if (worker.rank() == 0) check(library.get_unique_id(&id), "ncclGetUniqueId");
  const std::string sent = worker.group().broadcast_object({id.internal, sizeof id.internal}, 0);
  std::memcpy(id.internal, sent.data(), std::min(sent.size(), sizeof id.internal));
  ncclComm_t communicator = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  check(library.comm_init(&communicator, worker.ranks(), id, worker.rank(), &config), "ncclCommInitRankConfig");
  return [communicator, &library, stream = worker.stream()](float* in, float* out, std::size_t count) {
    check(library.all_reduce(in, out, count, ncclFloat32, ncclSum, communicator, stream), "ncclAllReduce");
  };
}
#endif

void add_variants(Worker& worker, const std::string& backend) {
  const auto ours = [&worker](float* in, float* out, std::size_t count) { worker.all_reduce(in, out, count); };
  // For a single rank in place NCCL has no work, so let it copy.
  const bool apart = backend == "nccl" && worker.ranks() == 1;
  const auto add = [&](const std::string& system, const std::string& kind, float* memory, const auto& call) {
    worker.variants().push_back({system, kind, memory, apart ? worker.ordinary() : memory, call});
  };
  if (backend != "native") add(backend, "registered", worker.registered(), ours);
  float* const memory = worker.ordinary();
  add(backend, "ordinary", memory, ours);
#ifdef MANIPLE_BENCH_NCCL
  if (backend == "nccl") add("bare NCCL", "ordinary", memory, bare_nccl(worker));
#endif
}

int number_in(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

int run(const std::string& backend, const std::vector<std::uint64_t>& sizes, int rounds, double milliseconds) {
  if (backend == "nccl" && number_in("WORLD_SIZE", 1) > 1) {
    // NCCL refuses two ranks on one GPU unless they seem to be on two hosts.
    setenv("NCCL_HOSTID", fmt::format("rank{}", number_in("RANK", 0)).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  }
  check(cudaSetDevice(0), "cudaSetDevice");
  InitOptions options;
  options.backend = backend == "native" ? backend : "cpu:native,cuda:" + backend;
  options.device = 0;
  options.timeout = std::chrono::seconds(60);
  Worker worker(init(options), *std::max_element(sizes.begin(), sizes.end()));
  if (worker.rank() == 0) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    std::printf("%s\n", nlohmann::ordered_json{{"gpu", properties.name}}.dump().c_str());
  }
  add_variants(worker, backend);
  for (const std::uint64_t bytes : sizes) worker.measure(bytes, rounds, milliseconds);
  worker.largest(0);  // do not leave while other ranks still need this one
  return 0;
}

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::fprintf(stderr, "usage: gpu_worker cuda|nccl|native SIZES ROUNDS MILLISECONDS\n");
    return 2;
  }
  const int status =
      maniple::bench::run(argv[1], maniple::bench::parse_sizes(argv[2]), std::atoi(argv[3]), std::atof(argv[4]));
  std::fflush(stdout);
  return status;
} catch (const std::exception& error) {
  std::fprintf(stderr, "gpu_worker: %s\n", error.what());
  return 1;
}
