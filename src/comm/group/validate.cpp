#include "comm/group/validate.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "comm/base/check.h"
#include "comm/collective/reduce/reduce.h"

namespace maniple {
namespace {

void require_root(Op op, int root, int size) {
  MANIPLE_REQUIRE(root >= 0 && root < size, "{}: root {} in a group of {} ranks", to_string(op), root, size);
}

// Templates take buffers by reference: converting and copying them would cost more than all checks together.

void require_same_dtype(Op op, const auto& input, const auto& output) {
  MANIPLE_REQUIRE(input.dtype == output.dtype, "{}: input is {} but output is {}", to_string(op),
                  to_string(input.dtype), to_string(output.dtype));
}

void require_count(Op op, const char* what, std::size_t count, std::size_t expected) {
  MANIPLE_REQUIRE(count == expected, "{}: {} has {} elements, expected {}", to_string(op), what, count, expected);
}

// More than any machine addresses, yet small enough that products with rank counts do not wrap around.
constexpr std::size_t kMostBytesOfCall = std::size_t{1} << 48;

// Element sizes are powers of two; a division would take as long as the other checks together.
std::size_t most_elements(DType dtype) { return kMostBytesOfCall >> std::countr_zero(size_of(dtype)); }

void require_valid(Op op, const char* what, const auto& buffer) {
  const bool known = static_cast<int>(buffer.dtype) < kDTypeCount;
  if (known && buffer.count <= most_elements(buffer.dtype) && (buffer.data != nullptr || buffer.count == 0)) [[likely]]
    return;
  require_memory(op, what, buffer);
}

bool overlap(const auto& a, const auto& b) noexcept {
  const auto first = reinterpret_cast<std::uintptr_t>(a.data), second = reinterpret_cast<std::uintptr_t>(b.data);
  return a.count != 0 && b.count != 0 && first < second + b.bytes() && second < first + a.bytes();
}

// Only exactly equal memory is in place: ranks read each other's input while they write their output, so with any other
// overlap they would read overwritten input.
void require_same_or_apart(Op op, const auto& input, const auto& output) {
  if (input.data == output.data) [[likely]]
    return;
  MANIPLE_REQUIRE(!overlap(input, output), "{}: input and output overlap; give the same memory twice, or memory apart",
                  to_string(op));
}
/// Requires that `part` is this rank's part of `whole`, or does not overlap it.
void require_own_or_apart(Op op, const char* part_name, const auto& part, const char* whole_name, const auto& whole,
                          const Parts& parts, int rank) {
  if (!overlap(part, whole)) [[likely]]
    return;
  const auto* const own = static_cast<const std::byte*>(whole.data) + parts.offset(rank) * size_of(whole.dtype);
  MANIPLE_REQUIRE(part.data == own, "{}: input and output overlap; {} may be this rank's part of {}, or memory apart",
                  to_string(op), part_name, whole_name);
}

Parts parts_of(Op op, DType dtype, std::size_t each, std::span<const std::size_t> counts, int size) {
  const std::size_t most = most_elements(dtype);
  if (counts.empty()) {
    std::size_t total = 0;
    MANIPLE_REQUIRE(!__builtin_mul_overflow(each, size, &total) && total <= most,
                    "{}: {} elements of {} for each of {} ranks exceed the maximum of {} in all", to_string(op), each,
                    to_string(dtype), size, most);
    return {each, size};
  }
  MANIPLE_REQUIRE(std::ssize(counts) == size, "{}: {} counts in a group of {} ranks", to_string(op), counts.size(),
                  size);
  // A sum that wraps around would look small.
  std::size_t total = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    MANIPLE_REQUIRE(counts[rank] <= most - total,
                    "{}: with the {} elements of rank {} the counts exceed the maximum of {} in all", to_string(op),
                    counts[rank], rank, most);
    total += counts[rank];
  }
  return Parts(counts);
}

Operation base(Op op, DType dtype, const CallOptions& call) {
  Operation operation;
  operation.op = op;
  operation.dtype = dtype;
  operation.where = call.where;
  return operation;
}

// `input` and `output` are the buffers this rank uses in the operation; an empty one may be anywhere.
void set_memory(Operation& operation, const auto& input, const Buffer& output, const CallOptions& call) {
  operation.in = static_cast<const std::byte*>(input.data);
  operation.out = static_cast<std::byte*>(output.data);
  const bool by_input = input.data != nullptr || output.data == nullptr;
  operation.device.type = by_input ? input.device.type : output.device.type;
  operation.device.index = by_input ? input.device.index : output.device.index;
  if (input.device != output.device) [[unlikely]] {
    MANIPLE_REQUIRE(input.data == nullptr || output.data == nullptr,
                    "{}: input is on {} but output is on {}; both must be on one device", to_string(operation.op),
                    to_string(input.device), to_string(output.device));
  }
  operation.stream = call.stream;
}

// `count` is the equal part, which ranks compare; uneven parts are compared by their hash.
void set_parts(Operation& operation, Parts parts) {
  operation.count = parts.equal() ? parts.count(0) : 0;
  operation.parts = std::move(parts);
}

}  // namespace

void require_memory(Op op, const char* what, ConstBuffer buffer) {
  require_dtype(buffer.dtype);
  MANIPLE_REQUIRE(buffer.count <= most_elements(buffer.dtype),
                  "{}: {} has {} elements of {}, which exceeds the maximum of {}", to_string(op), what, buffer.count,
                  to_string(buffer.dtype), most_elements(buffer.dtype));
  MANIPLE_REQUIRE(buffer.data != nullptr || buffer.count == 0, "{}: {} is null but has {} elements", to_string(op),
                  what, buffer.count);
}

void require_apart(const char* call, std::vector<UsedMemory> extents) {
  std::erase_if(extents, [](const UsedMemory& extent) { return extent.bytes == 0; });
  const auto begin = [](const UsedMemory& extent) { return reinterpret_cast<std::uintptr_t>(extent.data); };
  std::sort(extents.begin(), extents.end(),
            [&](const UsedMemory& a, const UsedMemory& b) { return begin(a) < begin(b); });
  std::uintptr_t end = 0, end_of_written = 0;  // of the extents so far
  for (const UsedMemory& extent : extents) {
    MANIPLE_REQUIRE(begin(extent) >= (extent.written ? end : end_of_written),
                    "{}: two of its buffers overlap, and one is written; give memory apart", call);
    end = std::max(end, begin(extent) + extent.bytes);
    if (extent.written) end_of_written = std::max(end_of_written, begin(extent) + extent.bytes);
  }
}

void require_limit(const char* what, Seconds limit) {
  MANIPLE_REQUIRE(limit.count() >= 0, "{} of {} s; it must not be negative", what, limit.count());
}

void require_transport(TransportKind kind) {
  MANIPLE_REQUIRE(kind <= TransportKind::tcp, "there is no transport {}; use one of the names in TransportKind",
                  static_cast<int>(kind));
}

Operation broadcast_operation(GroupShape group, Buffer buffer, int root, const CallOptions& call) {
  require_root(Op::broadcast, root, group.size);
  require_valid(Op::broadcast, "buffer", buffer);
  Operation operation = base(Op::broadcast, buffer.dtype, call);
  operation.root = root;
  operation.count = buffer.count;
  set_memory(operation, buffer, buffer, call);
  return operation;
}

Operation reduce_operation(GroupShape group, ConstBuffer input, Buffer output, int root, ReduceOp op,
                           const CallOptions& call) {
  require_root(Op::reduce, root, group.size);
  require_reducible(input.dtype, op);
  require_valid(Op::reduce, "input", input);
  if (group.rank == root) {
    require_same_dtype(Op::reduce, input, output);
    require_count(Op::reduce, "output", output.count, input.count);
    require_valid(Op::reduce, "output", output);
    require_same_or_apart(Op::reduce, input, output);
  }
  Operation operation = base(Op::reduce, input.dtype, call);
  operation.reduce = op;
  operation.root = root;
  operation.count = input.count;
  set_memory(operation, input, output, call);
  return operation;
}

Operation all_reduce_operation(GroupShape, ConstBuffer input, Buffer output, ReduceOp op, const CallOptions& call) {
  require_reducible(input.dtype, op);
  require_same_dtype(Op::all_reduce, input, output);
  require_count(Op::all_reduce, "output", output.count, input.count);
  require_valid(Op::all_reduce, "input", input);
  require_valid(Op::all_reduce, "output", output);
  require_same_or_apart(Op::all_reduce, input, output);
  Operation operation = base(Op::all_reduce, input.dtype, call);
  operation.reduce = op;
  operation.count = input.count;
  set_memory(operation, input, output, call);
  return operation;
}

Operation gather_operation(GroupShape group, ConstBuffer input, Buffer output, int root,
                           std::span<const std::size_t> counts, const CallOptions& call) {
  require_root(Op::gather, root, group.size);
  require_valid(Op::gather, "input", input);
  Operation operation = base(Op::gather, input.dtype, call);
  operation.root = root;
  set_parts(operation, parts_of(Op::gather, input.dtype, input.count, counts, group.size));
  require_count(Op::gather, "input", input.count, operation.parts.count(group.rank));
  if (group.rank == root) {
    require_same_dtype(Op::gather, input, output);
    require_count(Op::gather, "output", output.count, operation.parts.total());
    require_valid(Op::gather, "output", output);
    require_own_or_apart(Op::gather, "input", input, "output", output, operation.parts, group.rank);
  }
  set_memory(operation, input, output, call);
  return operation;
}

Operation all_gather_operation(GroupShape group, ConstBuffer input, Buffer output, std::span<const std::size_t> counts,
                               const CallOptions& call) {
  require_same_dtype(Op::all_gather, input, output);
  require_valid(Op::all_gather, "input", input);
  require_valid(Op::all_gather, "output", output);
  Operation operation = base(Op::all_gather, input.dtype, call);
  set_parts(operation, parts_of(Op::all_gather, input.dtype, input.count, counts, group.size));
  require_count(Op::all_gather, "input", input.count, operation.parts.count(group.rank));
  require_count(Op::all_gather, "output", output.count, operation.parts.total());
  require_own_or_apart(Op::all_gather, "input", input, "output", output, operation.parts, group.rank);
  set_memory(operation, input, output, call);
  return operation;
}

Operation scatter_operation(GroupShape group, ConstBuffer input, Buffer output, int root,
                            std::span<const std::size_t> counts, const CallOptions& call) {
  require_root(Op::scatter, root, group.size);
  require_valid(Op::scatter, "output", output);
  Operation operation = base(Op::scatter, output.dtype, call);
  operation.root = root;
  set_parts(operation, parts_of(Op::scatter, output.dtype, output.count, counts, group.size));
  require_count(Op::scatter, "output", output.count, operation.parts.count(group.rank));
  if (group.rank == root) {
    require_same_dtype(Op::scatter, input, output);
    require_count(Op::scatter, "input", input.count, operation.parts.total());
    require_valid(Op::scatter, "input", input);
    require_own_or_apart(Op::scatter, "output", output, "input", input, operation.parts, group.rank);
  }
  set_memory(operation, input, output, call);
  return operation;
}

Operation reduce_scatter_operation(GroupShape group, ConstBuffer input, Buffer output, ReduceOp op,
                                   std::span<const std::size_t> counts, const CallOptions& call) {
  require_reducible(input.dtype, op);
  require_same_dtype(Op::reduce_scatter, input, output);
  require_valid(Op::reduce_scatter, "input", input);
  require_valid(Op::reduce_scatter, "output", output);
  Operation operation = base(Op::reduce_scatter, input.dtype, call);
  operation.reduce = op;
  set_parts(operation, parts_of(Op::reduce_scatter, output.dtype, output.count, counts, group.size));
  require_count(Op::reduce_scatter, "output", output.count, operation.parts.count(group.rank));
  require_count(Op::reduce_scatter, "input", input.count, operation.parts.total());
  require_own_or_apart(Op::reduce_scatter, "output", output, "input", input, operation.parts, group.rank);
  set_memory(operation, input, output, call);
  return operation;
}

Operation all_to_all_operation(GroupShape group, ConstBuffer input, Buffer output,
                               std::span<const std::size_t> input_counts, std::span<const std::size_t> output_counts,
                               const CallOptions& call) {
  constexpr Op kOp = Op::all_to_all;
  require_same_dtype(kOp, input, output);
  require_valid(kOp, "input", input);
  require_valid(kOp, "output", output);
  MANIPLE_REQUIRE(!overlap(input, output), "all_to_all: input and output overlap; give memory apart");
  MANIPLE_REQUIRE(input_counts.empty() == output_counts.empty(),
                  "all_to_all: give counts for both input and output, or for neither");
  Operation operation = base(kOp, input.dtype, call);
  if (input_counts.empty()) {
    const std::size_t size = group.size;
    MANIPLE_REQUIRE(input.count % size == 0, "all_to_all: {} elements cannot be cut into {} equal parts; give counts",
                    input.count, size);
    require_count(kOp, "output", output.count, input.count);
    operation.count = input.count / size;
  }
  operation.in_parts = parts_of(kOp, input.dtype, operation.count, input_counts, group.size);
  operation.out_parts = parts_of(kOp, input.dtype, operation.count, output_counts, group.size);
  require_count(kOp, "input", input.count, operation.in_parts.total());
  require_count(kOp, "output", output.count, operation.out_parts.total());
  set_memory(operation, input, output, call);
  return operation;
}

Operation barrier_operation(const CallOptions& call) { return base(Op::barrier, DType::uint8, call); }

}  // namespace maniple
