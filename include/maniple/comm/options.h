// Options, with their defaults and what they trade.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <maniple/comm/source_location.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

using Seconds = std::chrono::duration<double>;

/// How bytes travel between two ranks.
enum class TransportKind : std::uint8_t {
  automatic,  ///< threads of one process: loopback; same host: shm; otherwise tcp. Right for nearly everyone.
  loopback,   ///< only for ranks that are threads of one process
  shm,        ///< only for ranks of one host
  tcp,        ///< everywhere; slower inside a host
};
std::string_view to_string(TransportKind kind) noexcept;
TransportKind parse_transport(std::string_view name);  ///< "auto", "loopback", "shm", "tcp"; throws InvalidArgument

struct InitOptions {
  /// How ranks find each other (rendezvous):
  ///   "env://"             MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, as every launcher of the PyTorch world sets
  ///                        them
  ///   "tcp://host:port"    rank 0 listens there; rank and world_size come from the fields below (or from
  ///                        `?rank=R&world_size=N`)
  ///   "file:///path"       a file all ranks can reach; rank may be left at -1 to be given one
  std::string init_method = "env://";

  /// -1: taken from the environment, the address, or (file://) assigned in the order of arrival.
  int rank = -1;
  int world_size = -1;

  /// The default limit of every operation (one deadline for one operation, not per step).
  Seconds timeout = std::chrono::minutes(30);

  /// Limit for init(); default: 5 minutes, or `timeout` if that is shorter.
  std::optional<Seconds> init_timeout = {};

  /// What communicates. For memory of the host: "native", "gloo", "mpi"; memory of a GPU then travels through memory of
  /// the host. For memory of a GPU: "cuda" (ranks that share a GPU, or GPUs of one host that reach each other) and
  /// "nccl"; tensors of the CPU are refused then. For both: "cpu:native,cuda:nccl".
  std::string backend = "native";
  /// The GPU of this rank for "cuda" and "nccl", as this process counts them; -1: its rank on this host, modulo the
  /// number of GPUs.
  int device = -1;
  TransportKind transport = TransportKind::automatic;

  /// Forces an algorithm by the name that `maniple bench --list` shows; empty: chosen by size and topology.
  std::string algorithm = {};
};

struct GroupOptions {
  std::optional<Seconds> timeout = {};          ///< default: that of the parent group
  std::optional<TransportKind> transport = {};  ///< default: that of the parent group
  std::optional<std::string> algorithm = {};    ///< default: that of the parent group
};

/// Given to single calls: `world->all_reduce(x, ReduceOp::sum, {.timeout = 5s, .async_op = true})`.
struct CallOptions {
  std::optional<Seconds> timeout = {};  ///< default: that of the group
  /// For collectives on buffers. false: the call returns when this rank's result is in place, and its Work is done.
  /// true: it returns at once, and the Work is done later. Other calls always return when they have finished.
  bool async_op = false;
  /// For memory of a device: the stream (a cudaStream_t) in whose order the operation runs: after what it holds now,
  /// and before what is enqueued later. The call then returns when the operation is enqueued; see work.h. Null: the
  /// default stream. With async_op it starts after what the stream holds, but runs on a stream of the group's own, and
  /// Work::wait orders the two.
  void* stream = nullptr;
  SourceLocation where = SourceLocation::current();  ///< the caller's line, for error messages; leave it alone
};

}  // namespace maniple
