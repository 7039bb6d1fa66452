// The operations of the nccl plugin, against the arithmetic of the native backend.
#include <cstring>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "comm/collective/reduce/reduce.h"
#include "plugins/nccl_ranks.h"

namespace maniple::gpu_tests {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DType kDTypes[] = {DType::int8,    DType::int16,    DType::int32,   DType::int64,   DType::uint8,
                             DType::float16, DType::bfloat16, DType::float32, DType::float64, DType::bool8};

std::string name_of(const Operation& op) {
  return std::string(to_string(op.op)) + " " + std::string(to_string(op.dtype)) + " " +
         std::string(to_string(op.reduce.kind())) + " of " + std::to_string(op.count) + ", root " +
         std::to_string(op.root) + (op.parts.equal() && op.in_parts.equal() ? "" : ", uneven");
}

/// Small whole numbers, so that every order of additions gives the same bits.
Bytes numbers(DType dtype, ReduceOp::Kind kind, int rank, std::size_t count) {
  Bytes bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const int any = static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 3) % 11);
    int value = kind == ReduceOp::product ? 1 + any % 2 : dtype == DType::uint8 ? any : any - 5;
    if (dtype == DType::bool8) value = any % 3;  // 2 is true, too
    std::byte* const to = bytes.data() + i * size_of(dtype);
    const auto put = [&](auto number) { std::memcpy(to, &number, sizeof number); };
    switch (dtype) {
      case DType::int8: put(static_cast<std::int8_t>(value)); break;
      case DType::int16: put(static_cast<std::int16_t>(value)); break;
      case DType::int32: put(value); break;
      case DType::int64: put(std::int64_t{value}); break;
      case DType::float16: put(float16(static_cast<float>(value))); break;
      case DType::bfloat16: put(bfloat16(static_cast<float>(value))); break;
      case DType::float32: put(static_cast<float>(value)); break;
      case DType::float64: put(static_cast<double>(value)); break;
      default: put(static_cast<std::uint8_t>(value)); break;
    }
  }
  return bytes;
}

Bytes reduced(const Operation& op, int size, std::size_t count) {
  std::vector<Bytes> all;
  std::vector<const void*> sources;
  for (int r = 0; r < size; ++r) all.push_back(numbers(op.dtype, op.reduce.kind(), r, count));
  for (const Bytes& one : all) sources.push_back(one.data());
  Bytes result(count * op.element());
  void* const to[] = {result.data()};
  if (count > 0) reduce(reduction_of(op, size), sources, to, count);
  return result;
}

Bytes pattern(int from, int to, std::size_t bytes) {
  Bytes result(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    result[i] = static_cast<std::byte>(from * 37 + to * 59 + static_cast<int>(i) * 11 + 5);
  return result;
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

/// Where `in` and `out` lie.
struct Place {
  enum Kind { apart, in_inside_out, out_inside_in } kind = apart;
  std::size_t offset = 0;  // bytes, of the one inside the other
};

/// Runs it with this input, and compares the output; `expected` is empty where there is none to be.
void check(NcclRank& rank, Operation op, const Bytes& in, const Bytes& expected, Place place) {
  const std::string name = name_of(op) + (place.kind == Place::apart ? "" : ", in place");
  const bool reduces = op.op == Op::reduce || op.op == Op::all_reduce || op.op == Op::reduce_scatter;
  if (rank.size == 1 && reduces && op.reduce.kind() == ReduceOp::premul_sum) {
    return require(!rank.plugin->can(op), name + ": can() is true");  // NCCL does not multiply where there is one rank
  }
  require(rank.plugin->can(op), name + ": can() is false");
  const bool inside_out = place.kind == Place::in_inside_out;
  const std::size_t larger = std::max(in.size(), expected.size());
  // Aligned to elements, where numbers are reduced, or to nothing.
  const std::size_t shift = reduces ? op.element() : 1;
  const DeviceBytes first(shift + larger);
  const DeviceBytes second(shift + larger);
  Bytes start(shift + larger, std::byte{0xee});
  second.write(start);
  std::copy(in.begin(), in.end(), start.begin() + static_cast<std::ptrdiff_t>(shift + (inside_out ? place.offset : 0)));
  first.write(start);
  op.in = first.data() + shift + (inside_out ? place.offset : 0);
  const bool apart = place.kind == Place::apart;
  op.out = apart ? second.data() + shift : first.data() + shift + (inside_out ? 0 : place.offset);
  rank.run(op);
  Bytes result = (apart ? second : first).read();
  result.erase(result.begin(), result.begin() + (op.out - (apart ? second : first).data()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool same = op.dtype == DType::bool8 ? (result[i] == std::byte{}) == (expected[i] == std::byte{})
                                               : result[i] == expected[i];
    require(same, name + ": byte " + std::to_string(i) + " is " + std::to_string(std::to_integer<int>(result[i])) +
                      " instead of " + std::to_string(std::to_integer<int>(expected[i])));
  }
}

Operation operation(Op op, DType dtype, std::size_t count, ReduceOp reduce = ReduceOp::sum, int root = 0) {
  Operation made;
  made.op = op;
  made.dtype = dtype;
  made.count = count;
  made.reduce = reduce;
  made.root = root;
  return made;
}

ReduceOp reduce_op(int kind, DType dtype) {
  if (kind != ReduceOp::premul_sum) return static_cast<ReduceOp::Kind>(kind);
  const bool whole = dtype < DType::float16;
  return ReduceOp::premultiplied(whole ? 3 : 0.5);
}

void check_reductions(NcclRank& rank) {
  const std::size_t counts[] = {0, 1, 7, 1000};
  int turn = 0;
  for (const DType dtype : kDTypes) {
    const bool floating = dtype >= DType::float16 && dtype <= DType::float64;
    for (int kind = 0; kind < ReduceOp::kKindCount; ++kind) {
      const bool bits = kind == ReduceOp::band || kind == ReduceOp::bor || kind == ReduceOp::bxor;
      if (bits && floating) continue;  // has no meaning
      if (dtype == DType::bool8 && (kind == ReduceOp::avg || kind == ReduceOp::premul_sum)) continue;
      const std::size_t count = counts[++turn % 4];
      Operation op = operation(Op::all_reduce, dtype, count, reduce_op(kind, dtype));
      bool can = dtype != DType::int16;
      if (dtype == DType::bool8) can = kind != ReduceOp::bxor;
      if (dtype != DType::bool8 && bits) can = false;
      if (floating && (kind == ReduceOp::min || kind == ReduceOp::max)) can = false;
      if (rank.size == 1) can = kind != ReduceOp::premul_sum;
      require(rank.plugin->can(op) == can, name_of(op) + ": can() is " + (can ? "false" : "true"));
      if (!can) {
        error_of(ErrorKind::unsupported, [&] { rank.plugin->enqueue(op); });
        continue;
      }
      const Place place{turn % 2 == 0 ? Place::apart : Place::out_inside_in, 0};
      check(rank, op, numbers(dtype, op.reduce.kind(), rank.rank, count), reduced(op, rank.size, count), place);
    }
  }
  Operation other = operation(Op::all_reduce, DType::float32, 8, ReduceOp::avg);
  other.ranks = rank.size + 1;
  require(!rank.plugin->can(other), "an average over more ranks than the group has");
  Operation askew = operation(Op::all_reduce, DType::float32, 1);
  askew.in = askew.out = reinterpret_cast<std::byte*>(4097);
  error_of(ErrorKind::invalid_argument, [&] { rank.plugin->enqueue(askew); });
  other.last_stage = false;
  check(rank, other, numbers(DType::float32, ReduceOp::avg, rank.rank, 8), reduced(other, rank.size, 8), {});
}

void check_rooted_reductions(NcclRank& rank) {
  const std::pair<DType, ReduceOp> some[] = {{DType::float32, ReduceOp::sum},
                                             {DType::int32, ReduceOp::avg},
                                             {DType::bfloat16, ReduceOp::premultiplied(0.5)},
                                             {DType::bool8, ReduceOp::band}};
  std::vector<std::size_t> uneven;
  for (int r = 0; r < rank.size; ++r) uneven.push_back(r == 1 ? 0 : 3 + 2 * static_cast<std::size_t>(r));
  for (const auto& [dtype, reduce] : some) {
    for (const bool in_place : {false, true}) {
      Operation op = operation(Op::reduce, dtype, 33, reduce, in_place ? 0 : rank.size - 1);
      const Bytes own = numbers(dtype, reduce.kind(), rank.rank, 33);
      check(rank, op, own, rank.rank == op.root ? reduced(op, rank.size, 33) : Bytes(),
            {in_place ? Place::out_inside_in : Place::apart});
      for (const Parts& parts : {Parts(21, rank.size), Parts(0, rank.size), Parts(uneven)}) {
        op = operation(Op::reduce_scatter, dtype, parts.equal() ? parts.count(0) : 0, reduce);
        op.parts = parts;
        const Bytes whole = reduced(op, rank.size, parts.total());
        const std::size_t offset = parts.offset(rank.rank) * op.element();
        const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(offset);
        const Bytes part(begin, begin + static_cast<std::ptrdiff_t>(parts.count(rank.rank) * op.element()));
        check(rank, op, numbers(dtype, reduce.kind(), rank.rank, parts.total()), part,
              {in_place ? Place::out_inside_in : Place::apart, in_place ? offset : 0});
      }
    }
  }
}

void check_movement(NcclRank& rank) {
  const int n = rank.size;
  const int root = n - 1;
  const bool is_root = rank.rank == root;
  std::vector<std::size_t> uneven;
  for (int r = 0; r < n; ++r) uneven.push_back(r == 1 ? 0 : 3 + 2 * static_cast<std::size_t>(r));
  for (const DType dtype : {DType::uint8, DType::int16, DType::float64}) {
    const std::size_t element = size_of(dtype);
    check(rank, operation(Op::broadcast, dtype, 77, {}, root), pattern(is_root ? 1 : 9, 0, 77 * element),
          pattern(1, 0, 77 * element), {Place::out_inside_in});
    for (const Parts& parts : {Parts(13, n), Parts(5000, n), Parts(0, n), Parts(uneven)}) {
      Bytes all;
      for (int r = 0; r < n; ++r) append(all, pattern(r, 0, parts.count(r) * element));
      const Bytes own = pattern(rank.rank, 0, parts.count(rank.rank) * element);
      const std::size_t offset = parts.offset(rank.rank) * element;
      for (const bool in_place : {false, true}) {
        const auto with_parts = [&](Op kind) {
          Operation op = operation(kind, dtype, parts.equal() ? parts.count(0) : 0, {}, root);
          op.parts = parts;
          return op;
        };
        const Place inside_out{in_place ? Place::in_inside_out : Place::apart, in_place ? offset : 0};
        const Place inside_in{in_place ? Place::out_inside_in : Place::apart, in_place ? offset : 0};
        check(rank, with_parts(Op::all_gather), own, all, inside_out);
        check(rank, with_parts(Op::gather), own, is_root ? all : Bytes(), is_root ? inside_out : Place{});
        check(rank, with_parts(Op::scatter), is_root ? all : Bytes(), own, is_root ? inside_in : Place{});
      }
    }
    for (const bool even : {true, false}) {
      const auto count = [&](int from, int to) { return static_cast<std::size_t>(even ? 11 : (2 * from + to) % 4); };
      std::vector<std::size_t> in_counts;
      std::vector<std::size_t> out_counts;
      Bytes in;
      Bytes out;
      for (int r = 0; r < n; ++r) {
        in_counts.push_back(count(rank.rank, r));
        out_counts.push_back(count(r, rank.rank));
        append(in, pattern(rank.rank, r, in_counts.back() * element));
        append(out, pattern(r, rank.rank, out_counts.back() * element));
      }
      Operation op = operation(Op::all_to_all, dtype, even ? 11 : 0);
      op.in_parts = even ? Parts(11, n) : Parts(in_counts);
      op.out_parts = even ? Parts(11, n) : Parts(out_counts);
      check(rank, op, in, out, {});
    }
  }
  rank.run(operation(Op::barrier, DType::uint8, 0));
}

void all_reduce(NcclRank& rank, std::byte* data, std::size_t count, void* stream) {
  Operation op = operation(Op::all_reduce, DType::float32, count);
  op.in = op.out = data;
  op.stream = stream;
  rank.plugin->enqueue(op);
}

Bytes floats(std::size_t count, float value) {
  const std::vector<float> values(count, value);
  Bytes bytes(count * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

float first_of(const DeviceBytes& memory) {
  float value = 0;
  std::memcpy(&value, memory.read().data(), sizeof value);
  return value;
}

void require_first(const DeviceBytes& memory, double value, const char* what) {
  require(first_of(memory) == static_cast<float>(value),
          std::string(what) + ": " + std::to_string(first_of(memory)) + " instead of " + std::to_string(value));
}

void check_batches(NcclRank& rank) {
  const DeviceBytes a(floats(1000, 1));
  const DeviceBytes b(floats(3, static_cast<float>(rank.rank)));
  const DeviceBytes c(floats(5, static_cast<float>(rank.rank)));
  rank.plugin->begin_batch();
  all_reduce(rank, a.data(), 1000, rank.stream);
  all_reduce(rank, b.data(), 0, rank.stream);
  Operation op = operation(Op::broadcast, DType::float32, 3, {}, rank.size - 1);
  op.in = op.out = b.data();
  op.stream = rank.stream;
  rank.plugin->enqueue(op);
  op = operation(Op::all_reduce, DType::float32, 5,
                 rank.size == 1 ? ReduceOp(ReduceOp::sum) : ReduceOp::premultiplied(2));
  op.in = op.out = c.data();
  op.stream = rank.stream;
  rank.plugin->enqueue(op);
  rank.plugin->end_batch(rank.stream);
  rank.wait();
  require_first(a, rank.size, "sum in a batch");
  require_first(b, rank.size - 1, "broadcast in a batch");
  require_first(c, rank.size * (rank.size - 1), "premultiplied sum in a batch");
  rank.plugin->begin_batch();
  rank.plugin->end_batch(rank.stream);
}

void check_messages(NcclRank& rank) {
  const int next = (rank.rank + 1) % rank.size;
  const int before = (rank.rank + rank.size - 1) % rank.size;
  const std::size_t large = 3 << 20;
  const DeviceBytes out1(pattern(rank.rank, 1, large));
  const DeviceBytes out2(pattern(rank.rank, 2, 5));
  const DeviceBytes in1(large);
  const DeviceBytes in2(5);
  const DeviceBytes self(5);
  const int me = rank.rank;
  const std::vector<DeviceMessage> messages = {
      {false, in1.data(), large, before, 7}, {true, out1.data(), large, next, 7}, {true, out2.data(), 0, next, 8},
      {true, out2.data(), 5, next, 8},       {true, out2.data(), 5, me, 0},       {false, in2.data(), 0, before, 8},
      {false, in2.data(), 5, before, 8},     {false, self.data(), 5, me, 0}};
  rank.plugin->enqueue_messages(messages, rank.stream);
  rank.wait();
  require(in1.read() == pattern(before, 1, large), "the large message");
  require(in2.read() == pattern(before, 2, 5), "the small message");
  require(self.read() == pattern(me, 2, 5), "the message to itself");
  error_of(ErrorKind::invalid_argument, [&] { rank.plugin->enqueue_messages({&messages[4], 1}, rank.stream); });
}

void sleep_in_stream(void*) {
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // sleep: a slow producer is what is tested
}

void check_streams(NcclRank& rank) {
  cudaStream_t other = nullptr;
  CUDA(::cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const DeviceBytes a(floats(1000, 0));
  const DeviceBytes b(floats(1000, 1));
  const DeviceBytes source(floats(1000, 3));
  CUDA(::cudaLaunchHostFunc(rank.stream, sleep_in_stream, nullptr));
  CUDA(::cudaMemcpyAsync(a.data(), source.data(), 4000, cudaMemcpyDefault, rank.stream));
  const double begin = now_s();
  all_reduce(rank, a.data(), 1000, rank.stream);
  require(now_s() - begin < 0.15, "enqueue waited for the stream");
  all_reduce(rank, b.data(), 1000, other);
  all_reduce(rank, b.data(), 1000, other);
  CUDA(::cudaStreamSynchronize(other));
  rank.wait();
  require_first(a, 3 * rank.size, "after a slow producer");
  require_first(b, rank.size * rank.size, "on another stream");
  CUDA(::cudaStreamDestroy(other));
}

void check_graph(NcclRank& rank) {
  require(rank.plugin->can_capture(), "can_capture");
  const DeviceBytes source(floats(100, 1));
  const DeviceBytes a(floats(100, 0));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CUDA(::cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeGlobal));
  CUDA(::cudaMemcpyAsync(a.data(), source.data(), 400, cudaMemcpyDefault, rank.stream));
  all_reduce(rank, a.data(), 100, rank.stream);
  all_reduce(rank, a.data(), 50, rank.stream);
  const DeviceMessage messages[] = {{true, a.data(), 4, (rank.rank + 1) % rank.size, 0},
                                    {false, a.data() + 8, 4, (rank.rank + rank.size - 1) % rank.size, 0}};
  rank.plugin->enqueue_messages(messages, rank.stream);
  CUDA(::cudaStreamEndCapture(rank.stream, &graph));
  CUDA(::cudaGraphInstantiateWithFlags(&executable, graph, 0));
  for (int turn = 1; turn <= 10; ++turn) {
    source.write(floats(100, static_cast<float>(turn)));
    CUDA(::cudaGraphLaunch(executable, rank.stream));
    rank.wait();
    require_first(a, turn * rank.size * rank.size, "from a graph");
  }
  CUDA(::cudaGraphExecDestroy(executable));
  CUDA(::cudaGraphDestroy(graph));
}

void check_registered(NcclRank& rank) {
  std::vector<std::size_t> sizes(static_cast<std::size_t>(rank.size), 1 << 20);
  RegisteredMemory kept;
  for (int turn = 0; turn < 2; ++turn) {
    const RegisteredMemory memory =
        rank.plugin->allocate(sizes, static_cast<std::uint64_t>(turn), Deadline::after(std::chrono::seconds(20)));
    require(memory.size() == sizes[static_cast<std::size_t>(rank.rank)] && memory.data() != nullptr, "size");
    Bytes zero(memory.size());
    CUDA(::cudaMemcpy(zero.data(), memory.data(), zero.size(), cudaMemcpyDefault));
    require(zero == Bytes(zero.size()), "registered memory is not zeroed");
    copy_to(memory.data(), floats(1000, 2));
    all_reduce(rank, static_cast<std::byte*>(memory.data()), 1000, rank.stream);
    rank.wait();
    float value = 0;
    CUDA(::cudaMemcpy(&value, static_cast<std::byte*>(memory.data()) + 3996, 4, cudaMemcpyDefault));
    require(value == 2.F * static_cast<float>(rank.size), "sum in registered memory");
    kept = memory;
    for (std::size_t r = 0; r < sizes.size(); ++r) sizes[r] = 4000 + 100 * r;  // uneven in the second turn
  }
  rank.plugin.reset();
  CUDA(::cudaMemset(kept.data(), 1, kept.size()));  // outlives the plugin
  CUDA(::cudaDeviceSynchronize());
}

class NcclPlugin : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!why_not().empty()) GTEST_SKIP() << why_not();
  }
};

TEST_P(NcclPlugin, Operations) {
  run_ranks(GetParam(), [](NcclRank& rank) {
    rank.make();
    require(rank.plugin->name().starts_with("NCCL 2."), std::string(rank.plugin->name()));
    check_reductions(rank);
    check_rooted_reductions(rank);
    check_movement(rank);
    require(rank.plugin->fault().kind == DeviceFault::Kind::none, "fault: " + rank.plugin->fault().reason);
  });
}

TEST_P(NcclPlugin, BatchesMessagesStreamsGraphsAndRegisteredMemory) {
  run_ranks(GetParam(), [](NcclRank& rank) {
    rank.make();
    check_batches(rank);
    check_messages(rank);
    check_streams(rank);
    check_graph(rank);
    check_registered(rank);
    rank.make();  // the same group once more
    check_batches(rank);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclPlugin, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace maniple::gpu_tests
