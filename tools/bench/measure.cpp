#include "tools/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include <fmt/format.h>

#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr int kProbes = 3;
constexpr double kWarmupSeconds = 0.02;
constexpr std::uint64_t kMaxWarmups = 2000;
constexpr std::uint64_t kFewest = 5;
constexpr std::uint64_t kMax = 100'000;

struct Layout {
  std::size_t out_offset = 0;
  std::size_t total = 0;
};

/// The same on every rank, even if a rank does not use all of it, because allocation may be collective.
Layout layout_of(const Case& what) {
  if (what.in_place()) return {0, what.bytes()};
  const std::size_t out_offset = (what.bytes() + kPage - 1) / kPage * kPage;
  return {out_offset, out_offset + what.bytes()};
}

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// Rank 0's value, returned on all ranks, which must agree on the number of calls.
std::uint64_t value_of_rank_0(Communicator& communicator, std::uint64_t value) {
  return communicator.largest(communicator.rank() == 0 ? value : 0);
}

std::uint64_t iterations_within(double budget_s, double call_s, std::uint64_t min, std::uint64_t max) {
  return static_cast<std::uint64_t>(
      std::clamp(budget_s / std::max(call_s, 1e-9), static_cast<double>(min), static_cast<double>(max)));
}

std::uint64_t warm_up(Communicator& communicator, const WorkItem& item) {
  double fastest = 1e9;
  for (int i = 0; i < kProbes; ++i) {
    const auto start = Clock::now();
    communicator.call();
    fastest = std::min(fastest, seconds(start, Clock::now()));
  }
  const std::uint64_t own = item.warmup >= 0 ? static_cast<std::uint64_t>(item.warmup)
                                             : iterations_within(kWarmupSeconds, fastest, 1, kMaxWarmups);
  const std::uint64_t calls = value_of_rank_0(communicator, own);
  const auto start = Clock::now();
  for (std::uint64_t i = 0; i < calls; ++i) communicator.call();
  const double mean = calls == 0 ? fastest : seconds(start, Clock::now()) / static_cast<double>(calls);
  return value_of_rank_0(communicator, item.iterations > 0 ? static_cast<std::uint64_t>(item.iterations)
                                                           : iterations_within(item.budget_s, mean, kFewest, kMax));
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
  // Zeros stay zeros under every reduction, so that repeated in-place calls neither overflow nor produce denormals.
  std::memset(in, 0, layout.total);

  row.iterations = warm_up(communicator, item);
  std::vector<double> microseconds(row.iterations);
  const double scale = 1e6 / trips(what.op);
  row.rewritten = item.rewrite;
  const std::size_t rewritten = item.rewrite ? what.in_count(communicator.rank()) * size_of(what.dtype) : 0;
  for (double& sample : microseconds) {
    std::memset(in, 0, rewritten);
    const auto start = Clock::now();
    communicator.call();
    sample = seconds(start, Clock::now()) * scale;
  }
  row.mean_us = mean(microseconds);
  row.p99_us = percentile(microseconds, 0.99);
  row.median_us = median(std::move(microseconds));
  set_bandwidth(row);
}

}  // namespace

void measure(Communicator& communicator, const WorkItem& item, const std::function<void(const Row&)>& report) {
  const std::vector<Case> cases = item.cases();
  std::size_t largest = 1;
  for (const Case& what : cases) largest = std::max(largest, layout_of(what).total);
  communicator.memory(largest);  // allocate the maximum once, not while measuring
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
    } catch (const InvalidArgument& error) {  // thrown on all ranks, and the group stays usable
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

namespace {

std::uint32_t mix(std::size_t index, int rank) noexcept {
  std::uint64_t x = index * 0x9E3779B97F4A7C15ULL + static_cast<std::uint64_t>(rank + 1) * 0xD6E8FEB86659FD93ULL;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  return static_cast<std::uint32_t>(x >> 40);
}

/// The input of `rank` at `index`: a whole number that every dtype represents exactly.
int input_value(const Case& what, std::size_t index, int rank) noexcept {
  const std::uint32_t bits = mix(index, rank);
  if (what.dtype == DType::bool8) return bits & 1;
  return is_reduction(what.op) ? 1 + static_cast<int>(bits % 3) : static_cast<int>(bits % 120);
}

/// The reduction over all ranks. Cast to the dtype, the result wraps as the dtype does.
std::int64_t reduce_whole(const Case& what, std::size_t index) noexcept {
  auto total = static_cast<std::uint64_t>(input_value(what, index, 0));
  for (int rank = 1; rank < what.ranks; ++rank) {
    const auto next = static_cast<std::uint64_t>(input_value(what, index, rank));
    switch (what.reduce.kind()) {
      case ReduceOp::product: total *= next; break;
      case ReduceOp::min: total = next < total ? next : total; break;
      case ReduceOp::max: total = next > total ? next : total; break;
      case ReduceOp::band: total &= next; break;
      case ReduceOp::bor: total |= next; break;
      case ReduceOp::bxor: total ^= next; break;
      default: total += next; break;
    }
  }
  if (what.reduce.kind() == ReduceOp::avg) total /= static_cast<std::uint64_t>(what.ranks);
  if (what.reduce.kind() == ReduceOp::premul_sum) total *= static_cast<std::uint64_t>(what.reduce.factor());
  return static_cast<std::int64_t>(total);
}

double reduce_real(const Case& what, std::size_t index) noexcept {
  Case sums = what;
  if (what.reduce.kind() == ReduceOp::avg) sums.reduce = ReduceOp::sum;
  const auto total = static_cast<double>(reduce_whole(sums, index));
  return what.reduce.kind() == ReduceOp::avg ? total / what.ranks : total;
}

/// The source rank and element of an output element, for operations that only move data.
struct Origin {
  int rank;
  std::size_t index;
};
Origin origin(const Case& what, int rank, std::size_t j) noexcept {
  const std::size_t part = what.part();
  const std::size_t offset = static_cast<std::size_t>(rank) * part;
  switch (what.op) {
    case Op::gather:
    case Op::all_gather: return {static_cast<int>(j / part), j % part};
    case Op::scatter: return {0, offset + j};
    case Op::all_to_all: return {static_cast<int>(j / part), offset + j % part};
    default: return {0, j};
  }
}

template <class T>
bool is_right(const Case& what, int rank, std::size_t j, T got) noexcept {
  if (!is_reduction(what.op)) {
    const Origin from = origin(what, rank, j);
    const int expected = input_value(what, from.index, from.rank);
    if constexpr (std::is_class_v<T>)
      return static_cast<float>(got) == static_cast<float>(expected);
    else
      return got == static_cast<T>(expected);
  }
  const std::size_t index = what.op == Op::reduce_scatter ? static_cast<std::size_t>(rank) * what.part() + j : j;
  if constexpr (std::is_same_v<T, bool>) {
    const auto kind = what.reduce.kind();
    const auto total = reduce_whole(what, index);
    return got ==
           (kind == ReduceOp::sum || kind == ReduceOp::max || kind == ReduceOp::bor ? total != 0 : (total & 1) != 0);
  } else if constexpr (std::is_integral_v<T>) {
    return got == static_cast<T>(reduce_whole(what, index));
  } else {
    const double expected = reduce_real(what, index);
    double value = 0, tolerance = 0;
    if constexpr (std::is_class_v<T>) {
      value = static_cast<float>(got);
      tolerance = 1.0 / 128;  // bfloat16 keeps 8 bits
      if (std::isinf(value)) return expected > 65504;
    } else {
      value = static_cast<double>(got);
      tolerance = 1e-6;
    }
    return std::abs(value - expected) <= tolerance * std::max(1.0, std::abs(expected));
  }
}

template <class T>
void fill_typed(const Case& what, int rank, T* input) {
  const std::size_t count = what.in_count(rank);
  for (std::size_t i = 0; i < count; ++i) {
    const int value = input_value(what, i, rank);
    if constexpr (std::is_class_v<T>)
      input[i] = T(static_cast<float>(value));
    else
      input[i] = static_cast<T>(value);
  }
}

template <class T>
std::size_t count_wrong_typed(const Case& what, int rank, const T* output) {
  constexpr std::size_t kAll = 256 * 1024, kEnd = 4096,
                        kStride = 251;  // prime, so that it does not align with parts or chunks
  const std::size_t count = what.out_count(rank);
  std::size_t wrong = 0;
  for (std::size_t j = 0; j < count;) {
    wrong += is_right(what, rank, j, output[j]) ? 0 : 1;
    j += count <= kAll || j < kEnd || j + kEnd >= count ? 1 : kStride;
  }
  return wrong;
}

template <class Visit>
auto with_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::int8: return visit(std::int8_t{});
    case DType::int16: return visit(std::int16_t{});
    case DType::int32: return visit(std::int32_t{});
    case DType::int64: return visit(std::int64_t{});
    case DType::uint8: return visit(std::uint8_t{});
    case DType::float16: return visit(float16{});
    case DType::bfloat16: return visit(bfloat16{});
    case DType::float32: return visit(float{});
    case DType::float64: return visit(double{});
    case DType::bool8: break;
  }
  return visit(bool{});
}

}  // namespace

void fill_input(const Case& what, int rank, void* input) {
  with_type(what.dtype, [&](auto zero) { fill_typed(what, rank, static_cast<decltype(zero)*>(input)); });
}

std::size_t count_wrong(const Case& what, int rank, const void* output) {
  return with_type(
      what.dtype, [&](auto zero) { return count_wrong_typed(what, rank, static_cast<const decltype(zero)*>(output)); });
}

}  // namespace maniple::bench
