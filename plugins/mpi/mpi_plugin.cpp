// MPI as a plugin backend: one communicator per group, and MPI's non-blocking collectives, so that an abort or a
// deadline can end the wait. Built once against Open MPI and once against MPICH.
//
// Data moves as bytes. MPI does the reductions where its arithmetic equals Maniple's: sums and products of float32,
// float64, int32 and int64; min, max and bitwise operations on integers. Maniple supplies the others: MPI's min and max
// of floats may lose a NaN, Open MPI's sums of 8 and 16 bits saturate instead of wrapping, and MPI lacks bfloat16 and
// Maniple's bool8.
//
// MPI's counts are int: element-wise operations are cut into pieces, and Maniple supplies other operations that exceed
// int. Either all ranks or none must pass MPI_IN_PLACE, but Maniple's callers choose individually. So the input of an
// all_reduce or all_gather is copied to the output first, and all ranks work in place.
#include <algorithm>
#include <climits>
#include <cstring>

#include "plugins/mpi/mpi_communicator.h"

namespace maniple::mpi_plugin {
namespace {

struct CallContext {
  MPI_Comm communicator;
  int rank;
  int size;
  const AbortToken& abort;
  Deadline deadline;
  std::size_t most;  ///< maximum elements (for a broadcast: bytes) in one MPI call
};

/// Calls `body(first, count)` for consecutive pieces until all `count` elements are done or `body` returns false.
template <class Body>
bool in_pieces(std::size_t count, std::size_t most, Body body) {
  for (std::size_t first = 0; first < count; first += most) {
    if (!body(first, static_cast<int>(std::min(most, count - first)))) return false;
  }
  return true;
}

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

/// Counts and offsets of the parts, with `scale` units per element.
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
bool run(const CallContext& call_context, const char* name, Start start) {
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto call = Runtime::get().enter();
    check(start(&request), name);
  }
  return complete(request, call_context.abort, call_context.deadline);
}

void place(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, bytes);
}

bool run_all_reduce(const CallContext& at, const Operation& op) {
  place(op.out, op.in, op.bytes());
  return in_pieces(op.count, at.most, [&](std::size_t first, int count) {
    return run(at, "MPI_Iallreduce", [&](MPI_Request* request) {
      return MPI_Iallreduce(MPI_IN_PLACE, op.out + first * op.element(), count, type_of(op.dtype),
                            reduction_of(op.reduce), at.communicator, request);
    });
  });
}

bool run_reduce(const CallContext& at, const Operation& op) {
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

bool run_broadcast(const CallContext& at, const Operation& op) {
  return in_pieces(op.bytes(), at.most, [&](std::size_t first, int count) {
    return run(at, "MPI_Ibcast", [&](MPI_Request* request) {
      return MPI_Ibcast(op.out + first, count, MPI_BYTE, op.root, at.communicator, request);
    });
  });
}

bool run_gather(const CallContext& at, const Operation& op) {
  const Counts parts(op.parts, at.size, op.element());
  const bool root = at.rank == op.root;
  const bool in_place = root && op.in == op.out + parts.offsets[at.rank];
  return run(at, "MPI_Igatherv", [&](MPI_Request* request) {
    return MPI_Igatherv(in_place ? MPI_IN_PLACE : op.in, parts.counts[at.rank], MPI_BYTE, op.out, parts.counts.data(),
                        parts.offsets.data(), MPI_BYTE, op.root, at.communicator, request);
  });
}

bool run_all_gather(const CallContext& at, const Operation& op) {
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

bool run_scatter(const CallContext& at, const Operation& op) {
  const Counts parts(op.parts, at.size, op.element());
  const bool in_place = at.rank == op.root && op.out == op.in + parts.offsets[at.rank];
  return run(at, "MPI_Iscatterv", [&](MPI_Request* request) {
    return MPI_Iscatterv(op.in, parts.counts.data(), parts.offsets.data(), MPI_BYTE, in_place ? MPI_IN_PLACE : op.out,
                         parts.counts[at.rank], MPI_BYTE, op.root, at.communicator, request);
  });
}

bool run_reduce_scatter(const CallContext& at, const Operation& op) {
  const Counts parts(op.parts, at.size, 1);
  const std::size_t bytes = op.parts.count(at.rank) * op.element();
  const std::byte* const end = op.in + op.parts.total() * op.element();
  // The result may overlap the input, which MPI still reads while it writes the result.
  const bool overlaps = op.out < end && op.in < op.out + bytes;
  std::unique_ptr<std::byte[]> aside;
  if (overlaps) aside = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::byte nothing{};  // MPICH requires an address even for an empty part
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

bool run_all_to_all(const CallContext& at, const Operation& op) {
  const int part = static_cast<int>(op.in_parts.count(0) * op.element());
  return run(at, "MPI_Ialltoall", [&](MPI_Request* request) {
    return MPI_Ialltoall(op.in, part, MPI_BYTE, op.out, part, MPI_BYTE, at.communicator, request);
  });
}

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

/// Returns false if it gave up and left a request behind in MPI.
bool run_collective(const CallContext& at, const Operation& op) {
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

#ifdef OPEN_MPI
constexpr const char* kName = "openmpi";
constexpr const char* kTitle = "Open MPI";
#else
constexpr const char* kName = "mpich";
constexpr const char* kTitle = "MPICH";
#endif

class MpiPlugin final : public Plugin {
 public:
  explicit MpiPlugin(const PluginContext& context) : context_(context), communicator_(context_) {}
  ~MpiPlugin() override {
    if (context_.abort->aborted() || !Runtime::get().usable()) return;  // all ranks learn of the failure otherwise
    try {
      communicator_.peers().send_leave_notices();
    } catch (const std::exception&) {
      // The other ranks get their errors at their deadlines instead.
    }
  }

  std::string_view name() const noexcept override { return kName; }
  bool can(const Operation& operation) const noexcept override { return has_collective(operation); }

  bool run(const Operation& operation, Deadline deadline) override {
    const CallContext call_context{communicator_.get(), context_.rank, context_.size(),
                                   *context_.abort,     deadline,      context_.most};
    if (run_collective(call_context, operation)) return true;
    Runtime::get().poison("a collective of " + context_.group + " was given up");
    return false;
  }

  // Every wait polls the abort token.
  void interrupt(bool lost) noexcept override { lost ? Runtime::get().note_failure() : Runtime::get().note_end(); }

  std::unique_ptr<ByteSink> sink(int rank, Traffic traffic) override {
    return make_sink(communicator_.endpoint(rank, traffic));
  }
  std::unique_ptr<ByteSource> source(int rank, Traffic traffic) override {
    return make_source(communicator_.endpoint(rank, traffic));
  }

 private:
  PluginContext context_;
  Communicator communicator_;
};

std::unique_ptr<Plugin> make(const PluginContext& context) { return std::make_unique<MpiPlugin>(context); }

constexpr PluginEntry kPlugin = {kPluginAbi, sizeof(Operation), kTitle, make};

}  // namespace
}  // namespace maniple::mpi_plugin

extern "C" MANIPLE_API const maniple::PluginEntry* maniple_plugin_entry() { return &maniple::mpi_plugin::kPlugin; }
