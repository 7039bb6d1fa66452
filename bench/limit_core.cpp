// The memory speed of one core: copying (memcpy) and adding (a += b) at the sizes of a work item. GB/s are the
// destination's bytes per time, as for an operation on a buffer of that size.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "tools/bench/measure.h"
#include "tools/bench/work_item.h"

namespace maniple::bench {
namespace {

using Clock = std::chrono::steady_clock;

void add(float* __restrict into, const float* __restrict from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) into[i] += from[i];
}

Row time_row(const WorkItem& item, const char* name, std::uint64_t bytes, const std::function<void()>& call) {
  std::vector<double> samples;
  for (int i = 0; i < 3; ++i) call();
  const auto begin = Clock::now();
  while (samples.size() < 5 ||
         (samples.size() < 100'000 && Clock::now() - begin < std::chrono::duration<double>(item.budget_s))) {
    const auto start = Clock::now();
    call();
    samples.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  Row row;
  row.op = row.backend = "limit";
  row.transport = "core";
  row.buffer = "ordinary";
  row.ranks = 1;
  row.bytes = bytes;
  row.dtype = "float32";
  row.algorithm = name;
  row.iterations = samples.size();
  row.mean_us = mean(samples);
  row.p99_us = percentile(samples, 0.99);
  row.median_us = median(std::move(samples));
  set_bandwidth(row);
  return row;
}

void run(const WorkItem& item) {
  PageMemory from_memory, into_memory;
  for (const std::uint64_t bytes : item.bytes) {
    const std::byte* from = from_memory.at_least(bytes);
    std::byte* into = into_memory.at_least(bytes);
    std::memset(from_memory.at_least(bytes), 0, bytes);
    std::memset(into, 0, bytes);
    const auto report = [&](const char* name, const std::function<void()>& call) {
      std::puts(to_line(time_row(item, name, bytes, call)).c_str());
    };
    report("memcpy", [&] { std::memcpy(into, from, bytes); });
    report("add",
           [&] { add(reinterpret_cast<float*>(into), reinterpret_cast<const float*>(from), bytes / sizeof(float)); });
  }
}

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) {
  try {
    maniple::bench::run(maniple::bench::parse_work_item(argc > 1 ? argv[1] : ""));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "limit_core: %s\n", error.what());
    return 1;
  }
}
