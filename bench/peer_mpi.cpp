// The peer MPI: runs a work item with MPI's own collectives. Built once against Open MPI and once against MPICH.
#include <mpi.h>

#include <cstdio>
#include <exception>

#include "tools/bench/measure.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

MPI_Datatype mpi_type(DType dtype) {
  switch (dtype) {
    case DType::int8: return MPI_INT8_T;
    case DType::int16: return MPI_INT16_T;
    case DType::int32: return MPI_INT32_T;
    case DType::int64: return MPI_INT64_T;
    case DType::uint8: return MPI_UINT8_T;
    case DType::float32: return MPI_FLOAT;
    case DType::float64: return MPI_DOUBLE;
    default: throw Unsupported("MPI has no type for " + std::string(to_string(dtype)));
  }
}

MPI_Op mpi_op(ReduceOp op) {
  switch (op.kind()) {
    case ReduceOp::sum: return MPI_SUM;
    case ReduceOp::product: return MPI_PROD;
    case ReduceOp::min: return MPI_MIN;
    case ReduceOp::max: return MPI_MAX;
    case ReduceOp::band: return MPI_BAND;
    case ReduceOp::bor: return MPI_BOR;
    case ReduceOp::bxor: return MPI_BXOR;
    default: throw Unsupported("MPI has no operation " + std::string(to_string(op.kind())));
  }
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(const WorkItem& item) : transport_(item.transport) { MPI_Comm_rank(MPI_COMM_WORLD, &rank_); }

  int rank() const override { return rank_; }
  std::string transport() const override { return transport_; }
  std::byte* memory(std::size_t bytes) override { return memory_.at_least(bytes); }

  void prepare(const Case& what, std::byte* in, std::byte* out) override {
    op_ = what.op;
    in_ = in;
    out_ = out;
    count_ = static_cast<int>(what.count);
    part_ = static_cast<int>(what.part());
    if (op_ == Op::barrier) return;
    type_ = mpi_type(what.dtype);
    reduce_ = mpi_op(what.reduce);
  }

  void call() override {
    const MPI_Comm world = MPI_COMM_WORLD;
    switch (op_) {
      case Op::all_reduce: MPI_Allreduce(MPI_IN_PLACE, out_, count_, type_, reduce_, world); break;
      case Op::broadcast: MPI_Bcast(out_, count_, type_, 0, world); break;
      case Op::reduce: MPI_Reduce(in_, out_, count_, type_, reduce_, 0, world); break;
      case Op::gather: MPI_Gather(in_, part_, type_, out_, part_, type_, 0, world); break;
      case Op::all_gather: MPI_Allgather(in_, part_, type_, out_, part_, type_, world); break;
      case Op::scatter: MPI_Scatter(in_, part_, type_, out_, part_, type_, 0, world); break;
      case Op::reduce_scatter: MPI_Reduce_scatter_block(in_, out_, part_, type_, reduce_, world); break;
      case Op::all_to_all: MPI_Alltoall(in_, part_, type_, out_, part_, type_, world); break;
      case Op::barrier: MPI_Barrier(world); break;
      case Op::send: ping_pong(); break;
      default: throw Unsupported("not measured with MPI: " + std::string(to_string(op_)));
    }
  }

  std::uint64_t largest(std::uint64_t value) override {
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
    return value;
  }

 private:
  void ping_pong() {
    const MPI_Comm world = MPI_COMM_WORLD;
    if (rank_ == 0) MPI_Send(out_, count_, type_, 1, 0, world);
    if (rank_ < 2) MPI_Recv(out_, count_, type_, 1 - rank_, 0, world, MPI_STATUS_IGNORE);
    if (rank_ == 1) MPI_Send(out_, count_, type_, 0, 0, world);
  }

  std::string transport_;
  PageMemory memory_;
  int rank_ = 0;
  Op op_ = Op::barrier;
  std::byte* in_ = nullptr;
  std::byte* out_ = nullptr;
  int count_ = 0, part_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
  MPI_Op reduce_ = MPI_SUM;
};

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) {
  using namespace maniple::bench;
  MPI_Init(&argc, &argv);
  try {
    const WorkItem item = parse_work_item(argc > 1 ? argv[1] : "");
    MpiCommunicator communicator(item);
    measure_and_print(communicator, item);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peer_mpi: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
