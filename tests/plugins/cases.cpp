#include "plugins/cases.h"

#include <cuda_runtime_api.h>
#include <sched.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "comm/base/half.h"
#include "comm/collective/reduce/reduce.h"

namespace maniple::device_test {
namespace {

constexpr std::size_t kGuard = 64;

std::uint64_t random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15ULL;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

double number_at(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::float16: {
      std::uint16_t bits;
      std::memcpy(&bits, at, sizeof bits);
      return half::float_from_float16(bits);
    }
    case DType::bfloat16: {
      std::uint16_t bits;
      std::memcpy(&bits, at, sizeof bits);
      return half::float_from_bfloat16(bits);
    }
    case DType::float32: {
      float value;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    case DType::float64: {
      double value;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    default: return 0;
  }
}

std::vector<std::size_t> row(const Case& test, int of, int size, bool sent) {
  std::vector<std::size_t> result;
  for (int i = 0; i < size; ++i) result.push_back(test.counts[sent ? of * size + i : i * size + of]);
  return result;
}

Bytes slice(const Bytes& all, std::size_t offset, std::size_t bytes) {
  return {all.begin() + static_cast<std::ptrdiff_t>(offset), all.begin() + static_cast<std::ptrdiff_t>(offset + bytes)};
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

}  // namespace

Bytes values(DType dtype, std::size_t count, std::uint64_t seed) {
  Bytes result(count * size_of(dtype));
  std::uint64_t state = seed * 1000003 + 17;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = random(state);
    std::byte* const at = result.data() + i * size_of(dtype);
    const auto write = [at](auto value) { std::memcpy(at, &value, sizeof value); };
    double number = static_cast<double>(bits >> 11) * 0x1p-53 * 4 - 2;
    if (bits % 61 == 0) number = NAN;
    if (bits % 67 == 0) number = INFINITY;
    switch (dtype) {
      case DType::float16: write(half::float16_from_float(static_cast<float>(number))); break;
      case DType::bfloat16: write(half::bfloat16_from_float(static_cast<float>(number))); break;
      case DType::float32: write(static_cast<float>(number)); break;
      case DType::float64: write(number); break;
      case DType::bool8: write(static_cast<std::uint8_t>(bits % 3 == 0 ? 0 : bits % 5)); break;
      default: std::memcpy(at, &bits, size_of(dtype)); break;
    }
  }
  return result;
}

bool same(DType dtype, const Bytes& a, const Bytes& b) {
  if (a.size() != b.size()) return false;
  if (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0) return true;
  for (std::size_t at = 0; at < a.size(); at += size_of(dtype)) {
    if (std::memcmp(a.data() + at, b.data() + at, size_of(dtype)) == 0) continue;
    if (!std::isnan(number_at(dtype, a.data() + at)) || !std::isnan(number_at(dtype, b.data() + at))) return false;
  }
  return true;
}

bool is_reducible(DType dtype, ReduceOp::Kind kind) {
  try {
    require_reducible(dtype, kind == ReduceOp::premul_sum ? ReduceOp::premultiplied(3) : ReduceOp(kind));
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

std::string Case::describe(int size) const {
  std::string text = std::string(to_string(op)) + " " + std::string(to_string(dtype)) + " " +
                     std::string(to_string(reduce.kind())) + " ranks " + std::to_string(size) + " counts";
  for (const std::size_t count : counts) text += " " + std::to_string(count);
  return text + " root " + std::to_string(root) + (in_place ? " in place" : "") + (registered ? " registered" : "") +
         (overlapping ? " overlapping" : "") + " shift " + std::to_string(shift);
}

Memory::Memory(Rank& rank, DevicePlugin& plugin, std::size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  require(::cudaMalloc(&memory, bytes) == cudaSuccess, "cudaMalloc failed");
  ordinary_ = static_cast<std::byte*>(memory);
  registered_ = rank.allocate(plugin, bytes);
}
Memory::~Memory() { ::cudaFree(ordinary_); }

void finish(Rank& rank, void* stream, double seconds) {
  const DeviceEvent event = rank.runtime().make_event(0);
  rank.runtime().record(event, {0, stream});
  const Deadline limit = Deadline::after(std::chrono::duration<double>(seconds));
  while (!rank.runtime().reached(event)) {
    require(!limit.expired(), "the stream did not get to its end");
    ::sched_yield();
  }
  rank.runtime().free_event(event);
}

void upload(Rank& rank, void* to, const Bytes& from, void* stream) {
  if (!from.empty()) rank.runtime().copy(to, from.data(), from.size(), {0, stream});
  finish(rank, stream);
}

Bytes download(Rank& rank, const void* from, std::size_t bytes, void* stream) {
  Bytes result(bytes);
  if (bytes != 0) rank.runtime().copy(result.data(), from, bytes, {0, stream});
  finish(rank, stream);
  return result;
}

void run_case(Rank& rank, DevicePlugin& plugin, const Memory& memory, const Case& test, void* stream,
              std::uint64_t seed) {
  const int size = rank.size();
  const int me = rank.rank();
  const std::size_t element = size_of(test.dtype);
  const bool uneven = test.counts.size() > 1;
  Operation operation;
  operation.op = test.op;
  operation.dtype = test.dtype;
  operation.reduce = test.reduce;
  operation.root = test.root;
  operation.count = uneven ? 0 : test.counts.empty() ? 0 : test.counts[0];
  operation.seq = seed;
  operation.device = Device::cuda(0);
  operation.stream = stream;
  operation.first_stage = test.first_stage;
  operation.last_stage = test.last_stage;
  operation.ranks = test.ranks;
  const Parts parts = uneven && test.op != Op::all_to_all ? Parts(test.counts) : Parts(operation.count, size);
  operation.parts = parts;
  operation.in_parts = operation.out_parts = Parts(operation.count, size);
  if (uneven && test.op == Op::all_to_all) {
    operation.in_parts = Parts(row(test, me, size, true));
    operation.out_parts = Parts(row(test, me, size, false));
  }

  // What every rank has before.
  std::vector<Bytes> inputs(size);
  for (int i = 0; i < size; ++i) {
    std::size_t count = operation.count;
    if (test.op == Op::gather || test.op == Op::all_gather) count = parts.count(i);
    if (test.op == Op::scatter || test.op == Op::reduce_scatter) count = parts.total();
    if (test.op == Op::all_to_all) {
      const auto sent = uneven ? row(test, i, size, true) : std::vector<std::size_t>(size, operation.count);
      count = std::accumulate(sent.begin(), sent.end(), std::size_t{0});
    }
    if (test.op == Op::barrier) count = 0;
    inputs[i] = values(test.dtype, count, seed * 131 + static_cast<std::uint64_t>(i));
  }
  // What this rank must have after.
  const auto reduced = [&](std::size_t first, std::size_t count) {
    std::vector<const void*> sources;
    for (const Bytes& input : inputs) sources.push_back(input.data() + first * element);
    Bytes result(count * element);
    void* const destination = result.data();
    if (count != 0) maniple::reduce(reduction_of(operation, size), sources, std::span(&destination, 1), count);
    return result;
  };
  const bool is_root = me == test.root;
  Bytes expected;
  std::size_t own = 0;  // where this rank's own part of out is, or of in
  bool has_in = true;
  switch (test.op) {
    case Op::broadcast: expected = inputs[test.root]; break;
    case Op::reduce:
      if (is_root) expected = reduced(0, operation.count);
      break;
    case Op::all_reduce: expected = reduced(0, operation.count); break;
    case Op::gather:
    case Op::all_gather:
      if (test.op == Op::all_gather || is_root) {
        for (const Bytes& input : inputs) append(expected, input);
      }
      own = parts.offset(me) * element;
      break;
    case Op::scatter:
      has_in = is_root;
      expected = slice(inputs[test.root], parts.offset(me) * element, parts.count(me) * element);
      own = parts.offset(me) * element;
      break;
    case Op::reduce_scatter:
      expected = reduced(parts.offset(me), parts.count(me));
      own = parts.offset(me) * element;
      break;
    case Op::all_to_all:
      for (int i = 0; i < size; ++i) {
        const Parts sent = uneven ? Parts(row(test, i, size, true)) : Parts(operation.count, size);
        append(expected, slice(inputs[i], sent.offset(me) * element, sent.count(me) * element));
      }
      break;
    default: break;
  }

  const Bytes input = has_in ? inputs[me] : Bytes();
  std::byte* in = memory.data(test.registered) + test.shift * static_cast<std::size_t>(me + 1);
  std::byte* out = in + (input.size() + 2 * kGuard) / kGuard * kGuard;
  const bool in_is_part = test.op == Op::gather || test.op == Op::all_gather;
  if (test.op == Op::broadcast || test.overlapping) {
    out = in;
  } else if (test.in_place && in_is_part && !expected.empty()) {
    out = in;
    in = out + own;
  } else if (test.in_place && !in_is_part) {
    out = has_in ? in + own : in;
  }
  const std::byte* const start = std::min(in, out);
  const std::size_t span =
      static_cast<std::size_t>(std::max(in + input.size(), out + expected.size()) - start) + kGuard;
  require(static_cast<std::size_t>(start - memory.data(test.registered)) + span <= memory.size(),
          "memory is too small");
  Bytes before(span, std::byte{0xa5});
  std::memcpy(before.data() + (in - start), input.data(), input.size());
  upload(rank, const_cast<std::byte*>(start), before, stream);
  operation.in = in;
  operation.out = out;
  require(plugin.can(operation), test.describe(size) + ": it cannot do it");
  plugin.enqueue(operation);
  const Bytes after = download(rank, start, span, stream);
  Bytes result = slice(after, static_cast<std::size_t>(out - start), expected.size());
  if (!same(test.dtype, result, expected)) {
    std::size_t at = 0;
    while (at < result.size() && result[at] == expected[at]) ++at;
    throw std::runtime_error(test.describe(size) + ": wrong from byte " + std::to_string(at) + " of " +
                             std::to_string(expected.size()) + " on");
  }
  std::memcpy(before.data() + (out - start), result.data(), result.size());
  require(before == after, test.describe(size) + ": it wrote elsewhere");
  const DeviceFault fault = plugin.fault();
  require(fault.kind == DeviceFault::Kind::none, test.describe(size) + ": fault " + fault.reason);
}

}  // namespace maniple::device_test
