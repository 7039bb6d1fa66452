#include "bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

#include <fmt/format.h>

#include "bench/pattern.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr int kProbes = 3;
constexpr double kWarmupSeconds = 0.02;
constexpr std::uint64_t kMostWarmups = 2000;
constexpr std::uint64_t kFewest = 5;
constexpr std::uint64_t kMost = 100'000;

struct Layout {
  std::size_t out_offset = 0;
  std::size_t total = 0;
};

/// The same on every rank, although not every rank uses all of it: allocation may be collective.
Layout layout_of(const Case& what) {
  if (what.in_place()) return {0, what.bytes()};
  const std::size_t out_offset = (what.bytes() + kPage - 1) / kPage * kPage;
  return {out_offset, out_offset + what.bytes()};
}

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// The value of rank 0, on all ranks: how often to call must not differ between them.
std::uint64_t value_of_rank_0(Communicator& communicator, std::uint64_t value) {
  return communicator.largest(communicator.rank() == 0 ? value : 0);
}

std::uint64_t iterations_within(double budget_s, double call_s, std::uint64_t fewest, std::uint64_t most) {
  return static_cast<std::uint64_t>(
      std::clamp(budget_s / std::max(call_s, 1e-9), static_cast<double>(fewest), static_cast<double>(most)));
}

std::uint64_t warm_up(Communicator& communicator, const WorkItem& item) {
  double fastest = 1e9;
  for (int i = 0; i < kProbes; ++i) {
    const auto start = Clock::now();
    communicator.call();
    fastest = std::min(fastest, seconds(start, Clock::now()));
  }
  const std::uint64_t own = item.warmup >= 0 ? static_cast<std::uint64_t>(item.warmup)
                                             : iterations_within(kWarmupSeconds, fastest, 1, kMostWarmups);
  const std::uint64_t calls = value_of_rank_0(communicator, own);
  const auto start = Clock::now();
  for (std::uint64_t i = 0; i < calls; ++i) communicator.call();
  const double mean = calls == 0 ? fastest : seconds(start, Clock::now()) / static_cast<double>(calls);
  return value_of_rank_0(communicator, item.iterations > 0 ? static_cast<std::uint64_t>(item.iterations)
                                                           : iterations_within(item.budget_s, mean, kFewest, kMost));
}

void measure_case(Communicator& communicator, const WorkItem& item, const Case& what, Row& row) {
  const Layout layout = layout_of(what);
  std::byte* in = communicator.memory(std::max<std::size_t>(layout.total, 1));
  std::byte* out = in + layout.out_offset;
  std::memset(in, 0, layout.total);
  fill_input(what, communicator.rank(), in);
  communicator.prepare(what, in, out);

  communicator.call();
  const std::size_t wrong = communicator.largest(count_wrong(what, communicator.rank(), out));
  if (wrong > 0) {
    row.error = fmt::format("wrong result: {} of the checked elements on the worst rank", wrong);
    return;
  }
  // Zeros stay zeros under every reduction, so that repeated calls in place neither overflow nor become denormal.
  std::memset(in, 0, layout.total);

  row.iterations = warm_up(communicator, item);
  std::vector<double> microseconds(row.iterations);
  const double scale = 1e6 / trips(what.op);
  for (double& sample : microseconds) {
    const auto start = Clock::now();
    communicator.call();
    sample = seconds(start, Clock::now()) * scale;
  }
  row.p99_us = percentile(microseconds, 0.99);
  row.median_us = median(std::move(microseconds));
  set_bandwidth(row);
}

}  // namespace

void measure(Communicator& communicator, const WorkItem& item, const std::function<void(const Row&)>& report) {
  const std::vector<Case> cases = item.cases();
  std::size_t most = 1;
  for (const Case& what : cases) most = std::max(most, layout_of(what).total);
  communicator.memory(most);  // once, so that small cases do not pay for large ones' growth in between
  for (const Case& what : cases) {
    Row row;
    row.op = item.op;
    row.backend = item.backend;
    row.buffer = item.buffer;
    row.ranks = item.ranks;
    row.bytes = what.bytes();
    row.dtype = item.dtype;
    row.algorithm = item.algorithm.empty() ? "auto" : item.algorithm;
    row.transport = communicator.transport();
    try {
      measure_case(communicator, item, what, row);
    } catch (const InvalidArgument& error) {  // the same on all ranks, and the group stays usable
      row.error = error.what();
    } catch (const Unsupported& error) {
      row.error = error.what();
    }
    report(row);
  }
}

void measure_and_print(Communicator& communicator, const WorkItem& item) {
  measure(communicator, item, [&](const Row& row) {
    if (communicator.rank() != 0) return;
    std::puts(to_line(row).c_str());
    std::fflush(stdout);
  });
}

}  // namespace maniple::bench
