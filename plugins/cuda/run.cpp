// Translates operations into kernels and waits on a stream.
#include <algorithm>
#include <bit>

#include "plugins/cuda/cuda_group.h"

namespace maniple::cuda_plugin {
namespace {

constexpr std::size_t kAlignment = 256;

// kernels.cu relies on these numbers.
static_assert(static_cast<int>(DType::uint8) == 4 && static_cast<int>(DType::bool8) == 9 && kDTypeCount == 10);
static_assert(ReduceOp::product == 2 && ReduceOp::bxor == 7 && ReduceOp::kKindCount == 9);

CUstreamBatchMemOpParams wait_for_bit(const void* address, std::uint32_t bit) {
  CUstreamBatchMemOpParams wait = {};
  wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  wait.waitValue.address = reinterpret_cast<CUdeviceptr>(address);
  wait.waitValue.value = bit;
  wait.waitValue.flags = CU_STREAM_WAIT_VALUE_AND;
  return wait;
}

CUstreamBatchMemOpParams write_word(const void* address, std::uint64_t value) {
  CUstreamBatchMemOpParams write = {};
  write.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  write.writeValue.address = reinterpret_cast<CUdeviceptr>(address);
  write.writeValue.value64 = value;
  return write;
}

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a_bytes != 0 && b_bytes != 0 && a < b + b_bytes && b < a + a_bytes;
}

/// Whether a reduction is a plain copy: with one rank the result equals the operand bit for bit, unless it is scaled or
/// converted to 0 or 1.
bool is_copy(const Operation& operation, int ranks) {
  const ReduceOp::Kind kind = operation.reduce.kind();
  if (ranks != 1 || operation.dtype == DType::bool8) return false;
  if (kind == ReduceOp::avg) return divisor(operation, ranks) == 1;
  return kind != ReduceOp::premul_sum || !operation.first_stage || operation.reduce.factor() == 1;
}

/// Whether the words for the active peers differ by a constant step, as for equal parts; if so, sets word and
/// word_step.
bool set_words(const EnterArguments& enter, ReduceArguments& work) {
  const std::uint64_t active = enter.signal.active;
  const int first = std::countr_zero(active);
  const int last = std::bit_width(active) - 1;
  const std::uint64_t whole = enter.words[last] - enter.words[first];
  const auto peers = static_cast<std::uint64_t>(std::max(1, last - first));
  work.word_step = whole / peers;
  work.word = enter.words[first] - static_cast<std::uint64_t>(first) * work.word_step;
  for (int peer = first; peer <= last; ++peer) {
    if ((active >> peer & 1) == 0) continue;
    if (enter.words[peer] != work.word + static_cast<std::uint64_t>(peer) * work.word_step) return false;
  }
  return true;
}

}  // namespace

/// One call, and the values derived from it.
struct CudaGroup::Call {
  const Operation& operation;
  Plan plan;
  Located memory;          // the memory that peers read (all_reduce: and write)
  std::uint64_t hash = 0;  // hash of the values on which all ranks must agree
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  cudaStream_t stream = nullptr;

  std::uint64_t hash_of(Range range) const noexcept { return mix(hash, plan.signature_of(range)); }
};

bool CudaGroup::can(const Operation& operation) const noexcept {
  switch (operation.op) {
    case Op::reduce:
    case Op::all_reduce:
    case Op::reduce_scatter: return can_reduce(operation.dtype, operation.reduce.kind());
    case Op::send:
    case Op::recv:
    case Op::allocate: return false;
    default: return true;
  }
}

bool CudaGroup::enqueue(const Operation& operation, void* end) {
  if (aborted_) throw Aborted("the group was aborted");
  const OnDevice on(device_);
  Call call{operation,
            Plan(operation, rank_, ranks_),
            {},
            0,
            operation.in,
            operation.out,
            static_cast<cudaStream_t>(operation.stream)};
  if (ranks_ > 1) order_after_last(call.stream);
  const bool all_reduce = operation.op == Op::all_reduce;
  if (operation.op == Op::broadcast) call.in = operation.out;
  if (ranks_ > 1 && (call.plan.largest != 0 || call.plan.pairwise)) {
    // The call works on registered memory if the memory that peers read is registered; for all_reduce, `out`, which
    // they write.
    const bool by_out =
        all_reduce || ((operation.op == Op::scatter || operation.op == Op::broadcast) && rank_ != operation.root);
    call.memory = by_out ? locate(call.out, call.plan.out_bytes) : locate(call.in, call.plan.in_bytes);
  }
  call.hash = mix(call.memory.memory != nullptr ? call.memory.number + 2 : 1, ranks_);
  const bool in_place = all_reduce && call.memory.memory != nullptr;
  const bool leads = ranks_ > 1 && one_device_ && (in_place || operation.op == Op::barrier);
  const bool leads_staged = !leads && leads_on_slots(call);
  if (ranks_ > 1) control_->note_call(mix(call.hash, call.plan.signature), operation.seq, leads || leads_staged);
  // Results that would overwrite unread input go through temporary memory.
  std::byte* result = nullptr;
  const bool exact = call.in + call.plan.send[rank_].offset == call.out + call.plan.recv[rank_].offset;
  if (!exact && overlap(call.in, call.plan.in_bytes, call.out, call.plan.out_bytes)) {
    void* memory = nullptr;
    check(::cudaMallocAsync(&memory, call.plan.out_bytes, call.stream), "cudaMallocAsync");
    result = call.out;
    call.out = static_cast<std::byte*>(memory);
  }
  if (in_place && call.in != call.out) {
    check(::cudaMemcpyAsync(call.out, call.in, call.plan.out_bytes, cudaMemcpyDefault, call.stream), "cudaMemcpyAsync");
    call.in = call.out;
  }
  if (ranks_ == 1) {
    run_alone(call);
  } else if (leads) {
    run_lead(call, call.out, call.plan.reduces ? operation.count : 0);
  } else if (leads_staged) {
    run_lead_staged(call);
  } else {
    run_rounds(call);
  }
  if (result != nullptr) {
    check(::cudaMemcpyAsync(result, call.out, call.plan.out_bytes, cudaMemcpyDefault, call.stream), "cudaMemcpyAsync");
    check(::cudaFreeAsync(call.out, call.stream), "cudaFreeAsync");
  }
  if (ranks_ > 1) {
    remember_last(call.stream, static_cast<cudaEvent_t>(end));
  } else if (end != nullptr) {
    check(::cudaEventRecord(static_cast<cudaEvent_t>(end), call.stream), "cudaEventRecord");
  }
  return end != nullptr;
}

Signal CudaGroup::make_signal(std::uint64_t active) const noexcept {
  Signal signal = {};
  signal.active = active;
  signal.rank = rank_;
  signal.ranks = ranks_;
  if (ranks_ == 1) return signal;
  signal.flags = reinterpret_cast<std::byte*>(flags(0));
  signal.flags_apart = in_kernel_ ? arena_->apart() : kFlagsBytes;
  signal.states = reinterpret_cast<std::byte*>(state(0));
  signal.states_apart = arena_->apart();
  signal.record = control_->on_device();
  signal.in_kernel = in_kernel_;
  signal.one_device = in_kernel_ && one_device_;
  return signal;
}

void CudaGroup::reduce(const Call& call, ReduceArguments& work) {
  const Operation& operation = call.operation;
  work.factor = operation.reduce.factor();
  work.divide_by = divisor(operation, ranks_);
  work.premultiply = operation.reduce.kind() == ReduceOp::premul_sum && operation.first_stage;
  launch_reduce(work, static_cast<int>(operation.dtype), operation.reduce.kind(), call.stream);
}

/// Sets where a call's kernels find the ranks' data: in registered memory or in slots.
void CudaGroup::set_sources(const Call& call, std::uint64_t active, WorkArguments& work) const noexcept {
  work.signal = make_signal(active);
  work.seq = call.operation.seq;
  if (const SharedMemory* memory = call.memory.memory.get(); memory != nullptr) {
    work.base = memory->first();
    work.apart = memory->apart();
  } else if (active != 0) {
    work.base = slot(0);
    work.apart = arena_->apart();
  }
}

/// Runs a call in a group of one rank, which never waits. An in-place call is often a no-op.
void CudaGroup::run_alone(const Call& call) {
  const Range& from = call.plan.send[0];
  const Range& to = call.plan.recv[0];
  if (to.bytes == 0) return;
  if (call.plan.reduces && !is_copy(call.operation, ranks_)) {
    ReduceArguments work = {};
    set_sources(call, 0, work);
    work.own = call.in + from.offset;
    work.out = call.out + to.offset;
    work.count = to.bytes / call.operation.element();
    return reduce(call, work);
  }
  if (call.out + to.offset == call.in + from.offset) return;
  check(::cudaMemcpyAsync(call.out + to.offset, call.in + from.offset, to.bytes, cudaMemcpyDefault, call.stream),
        "cudaMemcpyAsync");
}

/// Rank 0 does all the work, on all ranks' registered memory or slots; the other ranks only wait.
void CudaGroup::run_lead(const Call& call, std::byte* own, std::size_t count) {
  if (rank_ != 0) return follow(call);
  ReduceArguments work = {};
  set_sources(call, peers_, work);
  work.waits = in_kernel_ && may_wait(count * call.operation.element());
  if (in_kernel_ && !work.waits) launch_await(work.signal, call.stream);
  if (!in_kernel_) {
    std::vector<CUstreamBatchMemOpParams> batch;
    for (int rank = 1; rank < ranks_; ++rank) batch.push_back(wait_for_bit(&flags(0)->lead_ready[rank], 1));
    check(driver().stream_batch(call.stream, static_cast<unsigned>(batch.size()), batch.data(), 0),
          "cuStreamBatchMemOp");
  }
  work.expected = hash_in(make_word(call.hash_of({}), 0));
  work.lead = true;
  work.own = own;
  work.in_place = true;
  work.count = count;
  reduce(call, work);
}

void CudaGroup::follow(const Call& call) {
  const std::uint64_t word = make_word(call.hash_of({}), call.memory.offset);
  if (in_kernel_) {
    FollowArguments arguments = {};
    arguments.signal = make_signal(peers_);
    arguments.word = word;
    return launch_follow(arguments, call.stream);
  }
  CUstreamBatchMemOpParams batch[] = {
      write_word(&state(0)->words[rank_], word), write_word(&flags(0)->lead_ready[rank_], word),
      wait_for_bit(&flags(rank_)->lead_done, 1), write_word(&flags(rank_)->lead_done, 0)};
  check(driver().stream_batch(call.stream, 4, batch, 0), "cuStreamBatchMemOp");
}

/// Whether rank 0 works on the slots of an all_reduce on ordinary memory. If every rank reads all slots and writes its
/// own result, n ranks move (n + 3) n times the data. If rank 0 works on the slots and the other ranks copy, they move
/// 6 n times the data, and need fewer context switches if contexts take turns.
bool CudaGroup::leads_on_slots(const Call& call) const noexcept {
  constexpr std::size_t kLeast = std::size_t{4} << 20;
  if (call.operation.op != Op::all_reduce || !one_device_ || ranks_ == 1 || call.plan.largest == 0) return false;
  return !in_kernel_ || (ranks_ > 3 && call.plan.largest >= kLeast);
}

void CudaGroup::run_lead_staged(const Call& call) {
  const std::size_t element = call.operation.element();
  for (std::size_t start = 0; start < call.plan.largest; start += slot_bytes_) {
    const std::size_t bytes = std::min(slot_bytes_, call.plan.largest - start);
    check(::cudaMemcpyAsync(slot(rank_), call.in + start, bytes, cudaMemcpyDefault, call.stream), "cudaMemcpyAsync");
    run_lead(call, slot(rank_), bytes / element);
    check(::cudaMemcpyAsync(call.out + start, slot(rank_), bytes, cudaMemcpyDefault, call.stream), "cudaMemcpyAsync");
  }
}

void CudaGroup::run_rounds(const Call& call) {
  const Plan& plan = call.plan;
  const bool direct = call.memory.memory != nullptr;
  const std::size_t regions = plan.one_for_all || call.operation.op == Op::broadcast ? 1 : ranks_;
  const std::size_t chunk = slot_bytes_ / (regions * kAlignment) * kAlignment;
  // The number of rounds for each pair; both ranks of a pair compute the same number.
  std::vector<std::size_t> rounds(ranks_, 1);
  if (!direct) {
    for (int peer = 0; peer < ranks_; ++peer) {
      const std::size_t bytes = plan.pairwise ? std::max(plan.send[peer].bytes, plan.recv[peer].bytes) : plan.largest;
      rounds[peer] = std::max<std::size_t>(1, (bytes + chunk - 1) / chunk);
    }
  }
  const std::size_t most = *std::max_element(rounds.begin(), rounds.end());
  for (std::size_t round = 0; round < most; ++round) {
    run_round(call, rounds, round, direct ? std::size_t{1} << 62 : chunk);
  }
}

void CudaGroup::run_round(const Call& call, const std::vector<std::size_t>& rounds, std::size_t round,
                          std::size_t chunk) {
  const Plan& plan = call.plan;
  const bool direct = call.memory.memory != nullptr;
  const bool all_at_once = std::all_of(rounds.begin(), rounds.end(), [&](std::size_t n) { return n == rounds[0]; });
  const std::size_t start = round * chunk;
  const auto piece = [&](Range range) { return std::min(chunk, range.bytes - std::min(range.bytes, start)); };
  std::uint64_t active = 0;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && rounds[peer] > round) active |= std::uint64_t{1} << peer;
  }

  EnterArguments enter = {};
  if (active != 0) {
    enter.signal = make_signal(active);
    for (int peer = 0; peer < ranks_; ++peer) {
      if ((active >> peer & 1) == 0) continue;
      const Range& range = plan.send[peer];
      const std::size_t place = plan.one_for_all ? 0 : chunk * peer;
      enter.words[peer] = make_word(call.hash_of(range), direct ? call.memory.offset + range.offset : place);
      const std::size_t bytes = piece(range);
      if (direct || !plan.read_by_others || bytes == 0 || (plan.one_for_all && enter.piece_count > 0)) continue;
      enter.pieces[enter.piece_count++] = {call.in + range.offset + start, slot(rank_) + place, bytes};
    }
  }

  const auto prepare = [&](WorkArguments& work) {
    set_sources(call, active, work);
    work.own = call.in + plan.send[rank_].offset + start;
  };
  const auto hash_from = [&](int peer) { return hash_in(make_word(call.hash_of(plan.recv[peer]), 0)); };
  const auto enter_before = [&] {
    if (active == 0) return;
    launch_enter(enter, call.stream);
    wait_for(flags(rank_)->ready, active, all_at_once, call.stream);
  };
  if (plan.reduces && !is_copy(call.operation, ranks_)) {
    ReduceArguments work = {};
    prepare(work);
    work.expected = hash_from(rank_);  // the same for all ranks: reductions are not pairwise
    const std::size_t element = call.operation.element();
    if (direct && call.operation.op == Op::all_reduce) {
      // Every rank has a slice, which it reads from all ranks and writes to all ranks.
      const std::size_t lanes = kAlignment / element;
      const std::size_t count = call.operation.count;
      const std::size_t each = (count + lanes * ranks_ - 1) / (lanes * ranks_) * lanes;
      work.in_place = true;
      work.first = std::min(count, each * rank_);
      work.count = std::min(count - work.first, each);
    } else {
      work.out = call.out + start;
      work.count = piece(plan.recv[rank_]) / element;
    }
    if (active == 0 && work.count == 0) return;
    work.enters = in_kernel_ && active != 0 && enter.piece_count <= 1 &&
                  is_one_block(std::max(enter.pieces[0].bytes, work.count * element)) && set_words(enter, work);
    if (work.enters) {
      work.piece = enter.pieces[0];
    } else {
      enter_before();
    }
    reduce(call, work);
  } else {
    CopyArguments work = {};
    prepare(work);
    for (int peer = 0; peer < ranks_; ++peer) work.expected[peer] = hash_from(peer);
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_ && rounds[peer] <= round) continue;
      work.bytes[peer] = piece(plan.recv[peer]);
      work.to[peer] = call.out + plan.recv[peer].offset + start;
    }
    if (active == 0 && work.bytes[rank_] == 0) return;
    enter_before();
    launch_copy(work, call.stream);
  }
  if (active != 0) wait_for(flags(rank_)->done, active, all_at_once, call.stream);
}

/// If kernels do not wait, makes the stream wait until the byte of every active peer is set. Tests all bytes at once
/// only if no other byte can be set meanwhile, that is, if no peer may already be in its next operation.
void CudaGroup::wait_for(const std::uint8_t* bytes, std::uint64_t active, bool all_at_once, cudaStream_t stream) {
  if (in_kernel_) return;
  std::vector<CUstreamBatchMemOpParams> batch;
  for (int base = 0; base < ranks_; base += 8) {
    std::uint64_t pattern = 0;
    for (int i = 0; i < 8; ++i) {
      if ((active >> (base + i) & 1) == 0) continue;
      pattern |= std::uint64_t{1} << (8 * i);
      if (!all_at_once) batch.push_back(wait_for_bit(bytes + base + i / 4 * 4, 1u << (8 * (i % 4))));
    }
    if (!all_at_once || pattern == 0) continue;
    CUstreamBatchMemOpParams wait = {};
    wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    wait.waitValue.address = reinterpret_cast<CUdeviceptr>(bytes + base);
    wait.waitValue.value64 = pattern;
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    batch.push_back(wait);
  }
  check(driver().stream_batch(stream, static_cast<unsigned>(batch.size()), batch.data(), 0), "cuStreamBatchMemOp");
}

}  // namespace maniple::cuda_plugin
