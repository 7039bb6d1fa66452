// Movement is done in bytes. Reductions are MPI's where its arithmetic is ours: sums and products of float32, float64, int32 and
// int64; min, max and bits of integers. Its min and max of floats may lose a NaN, Open MPI's sums of 8 and 16 bits do not wrap
// around but stop at the largest value, and MPI has neither bfloat16 nor our bool8; those are supplied by others.
//
// MPI counts in int: element-wise operations are cut into pieces, and others that are longer are supplied by others too.
// MPI_IN_PLACE must be given by all ranks or none, and our callers choose by themselves; so what an all_reduce or all_gather
// takes is copied to where the result will be, and all are in place.
#include "backend/plugin/mpi/mpi_collectives.h"

#include "backend/plugin/mpi/mpi_chunks.h"

#include <algorithm>
#include <climits>
#include <cstring>

namespace maniple::mpi_engine {
namespace {

bool is_integer(DType dtype) noexcept {
  switch (dtype) {
    case DType::int8:
    case DType::int16:
    case DType::int32:
    case DType::int64:
    case DType::uint8: return true;
    default: return false;
  }
}

bool can_reduce(const Operation& op) noexcept {
  const bool floating = op.dtype == DType::float32 || op.dtype == DType::float64;
  switch (op.reduce.kind()) {
    case ReduceOp::sum:
    case ReduceOp::product: return floating || op.dtype == DType::int32 || op.dtype == DType::int64;
    case ReduceOp::min:
    case ReduceOp::max:
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor: return is_integer(op.dtype);
    default: return false;
  }
}

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::int8: return MPI_INT8_T;
    case DType::int16: return MPI_INT16_T;
    case DType::int32: return MPI_INT32_T;
    case DType::int64: return MPI_INT64_T;
    case DType::float32: return MPI_FLOAT;
    case DType::float64: return MPI_DOUBLE;
    default: return MPI_UINT8_T;
  }
}

MPI_Op reduction_of(ReduceOp op) {
  switch (op.kind()) {
    case ReduceOp::product: return MPI_PROD;
    case ReduceOp::min: return MPI_MIN;
    case ReduceOp::max: return MPI_MAX;
    case ReduceOp::band: return MPI_BAND;
    case ReduceOp::bor: return MPI_BOR;
    case ReduceOp::bxor: return MPI_BXOR;
    default: return MPI_SUM;
  }
}

bool fits(const Parts& parts, std::size_t element) noexcept { return parts.total() * element <= INT_MAX; }

/// Counts and offsets of the parts, in units of `scale` for each element.
struct Counts {
  Counts(const Parts& parts, int size, std::size_t scale) {
    for (int rank = 0; rank < size; ++rank) {
      counts.push_back(static_cast<int>(parts.count(rank) * scale));
      offsets.push_back(static_cast<int>(parts.offset(rank) * scale));
    }
  }
  std::vector<int> counts;
  std::vector<int> offsets;
};

/// Starts a request and waits for it.
template <class Start>
bool run(const Setting& setting, const char* name, Start start) {
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto call = Runtime::get().enter();
    check(start(&request), name);
  }
  return complete(request, setting.abort, setting.deadline);
}

void place(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, bytes);
}

bool run_all_reduce(const Setting& at, const Operation& op) {
  place(op.out, op.in, op.bytes());
  return in_pieces(op.count, at.most, [&](std::size_t first, int count) {
    return run(at, "MPI_Iallreduce", [&](MPI_Request* request) {
      return MPI_Iallreduce(MPI_IN_PLACE, op.out + first * op.element(), count, type_of(op.dtype),
                            reduction_of(op.reduce), at.communicator, request);
    });
  });
}

bool run_reduce(const Setting& at, const Operation& op) {
  const bool in_place = at.rank == op.root;
  if (in_place) place(op.out, op.in, op.bytes());
  return in_pieces(op.count, at.most, [&](std::size_t first, int count) {
    const std::size_t offset = first * op.element();
    return run(at, "MPI_Ireduce", [&](MPI_Request* request) {
      return MPI_Ireduce(in_place ? MPI_IN_PLACE : op.in + offset, in_place ? op.out + offset : nullptr, count,
                         type_of(op.dtype), reduction_of(op.reduce), op.root, at.communicator, request);
    });
  });
}

bool run_broadcast(const Setting& at, const Operation& op) {
  return in_pieces(op.bytes(), at.most, [&](std::size_t first, int count) {
    return run(at, "MPI_Ibcast", [&](MPI_Request* request) {
      return MPI_Ibcast(op.out + first, count, MPI_BYTE, op.root, at.communicator, request);
    });
  });
}

bool run_gather(const Setting& at, const Operation& op) {
  const Counts parts(op.parts, at.size, op.element());
  const bool root = at.rank == op.root;
  const bool in_place = root && op.in == op.out + parts.offsets[at.rank];
  return run(at, "MPI_Igatherv", [&](MPI_Request* request) {
    return MPI_Igatherv(in_place ? MPI_IN_PLACE : op.in, parts.counts[at.rank], MPI_BYTE, op.out, parts.counts.data(),
                        parts.offsets.data(), MPI_BYTE, op.root, at.communicator, request);
  });
}

bool run_all_gather(const Setting& at, const Operation& op) {
  const Counts parts(op.parts, at.size, op.element());
  place(op.out + parts.offsets[at.rank], op.in, parts.counts[at.rank]);
  return run(at, "MPI_Iallgatherv", [&](MPI_Request* request) {
    if (op.parts.equal()) {
      return MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, op.out, parts.counts[0], MPI_BYTE, at.communicator, request);
    }
    return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, op.out, parts.counts.data(), parts.offsets.data(), MPI_BYTE,
                           at.communicator, request);
  });
}

bool run_scatter(const Setting& at, const Operation& op) {
  const Counts parts(op.parts, at.size, op.element());
  const bool in_place = at.rank == op.root && op.out == op.in + parts.offsets[at.rank];
  return run(at, "MPI_Iscatterv", [&](MPI_Request* request) {
    return MPI_Iscatterv(op.in, parts.counts.data(), parts.offsets.data(), MPI_BYTE, in_place ? MPI_IN_PLACE : op.out,
                         parts.counts[at.rank], MPI_BYTE, op.root, at.communicator, request);
  });
}

bool run_reduce_scatter(const Setting& at, const Operation& op) {
  const Counts parts(op.parts, at.size, 1);
  const std::size_t bytes = op.parts.count(at.rank) * op.element();
  const std::byte* const end = op.in + op.parts.total() * op.element();
  // The result may lie in the input, which MPI is still reading when it writes.
  const bool overlaps = op.out < end && op.in < op.out + bytes;
  std::unique_ptr<std::byte[]> aside;
  if (overlaps) aside = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::byte nothing{};  // MPICH wants an address for a part of no elements too
  std::byte* const out = bytes == 0 ? &nothing : overlaps ? aside.get() : op.out;
  const bool done = run(at, "MPI_Ireduce_scatter", [&](MPI_Request* request) {
    return MPI_Ireduce_scatter(op.in, out, parts.counts.data(), type_of(op.dtype), reduction_of(op.reduce),
                               at.communicator, request);
  });
  if (!done) {
    (void)aside.release();  // MPI may still write there
    return false;
  }
  if (overlaps) place(op.out, out, bytes);
  return true;
}

bool run_all_to_all(const Setting& at, const Operation& op) {
  const int part = static_cast<int>(op.in_parts.count(0) * op.element());
  return run(at, "MPI_Ialltoall", [&](MPI_Request* request) {
    return MPI_Ialltoall(op.in, part, MPI_BYTE, op.out, part, MPI_BYTE, at.communicator, request);
  });
}

}  // namespace

bool has_collective(const Operation& op) noexcept {
  switch (op.op) {
    case Op::broadcast:
    case Op::barrier: return true;
    case Op::reduce:
    case Op::all_reduce: return can_reduce(op);
    case Op::reduce_scatter: return can_reduce(op) && fits(op.parts, op.element());
    case Op::gather:
    case Op::scatter:
    case Op::all_gather: return fits(op.parts, op.element());
    case Op::all_to_all: return op.in_parts.equal() && op.out_parts.equal() && fits(op.in_parts, op.element());
    default: return false;
  }
}

bool run_collective(const Setting& at, const Operation& op) {
  switch (op.op) {
    case Op::broadcast: return run_broadcast(at, op);
    case Op::reduce: return run_reduce(at, op);
    case Op::all_reduce: return run_all_reduce(at, op);
    case Op::gather: return run_gather(at, op);
    case Op::all_gather: return run_all_gather(at, op);
    case Op::scatter: return run_scatter(at, op);
    case Op::reduce_scatter: return run_reduce_scatter(at, op);
    case Op::all_to_all: return run_all_to_all(at, op);
    default:
      return run(at, "MPI_Ibarrier", [&](MPI_Request* request) { return MPI_Ibarrier(at.communicator, request); });
  }
}

}  // namespace maniple::mpi_engine
