// Options of init(), of groups and of single calls, with their defaults.
//
//   maniple::InitOptions options;
//   options.timeout = std::chrono::minutes(5);
//   auto world = maniple::init(options);
//   world->all_reduce(buffer_of(x), ReduceOp::sum, {.timeout = std::chrono::seconds(10)});
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
  automatic,  ///< threads of one process: loopback; same host: shm; otherwise tcp. Right for nearly every job
  loopback,   ///< only for ranks that are threads of one process
  shm,        ///< only for ranks on one host
  tcp,        ///< everywhere; slower inside a host
};
std::string_view to_string(TransportKind kind) noexcept;
TransportKind parse_transport(std::string_view name);  ///< "auto", "loopback", "shm", "tcp"; throws InvalidArgument

/// Options of init().
struct InitOptions {
  /// How ranks find each other (rendezvous):
  ///   "env://"             MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which all PyTorch-compatible launchers set
  ///   "tcp://host:port"    rank 0 listens on this address; rank and world_size are set below (or by
  ///                        `?rank=R&world_size=N`)
  ///   "file:///path"       a file that all ranks can reach; a rank left at -1 is assigned
  std::string init_method = "env://";

  /// -1: taken from the environment or the address. With file://, a rank of -1 is assigned in the order of arrival; the
  /// world size must be set here or in the address.
  int rank = -1;
  int world_size = -1;

  /// The default limit of an operation: one deadline for all its steps.
  Seconds timeout = std::chrono::minutes(30);

  /// Limit of init(); default: 5 minutes, or `timeout` if that is shorter.
  std::optional<Seconds> init_timeout = {};

  /// What communicates. For host memory: "native", "gloo" or "mpi"; GPU memory is then copied through host memory. For
  /// GPU memory: "cuda" (ranks that share a GPU, or GPUs of one host with peer access) or "nccl"; CPU tensors are then
  /// refused. For both: "cpu:native,cuda:nccl".
  std::string backend = "native";
  /// This rank's GPU for "cuda" and "nccl", as this process counts GPUs. -1: its rank on this host, modulo the number
  /// of GPUs.
  int device = -1;
  TransportKind transport = TransportKind::automatic;  ///< automatic: MANIPLE_TRANSPORT, if it is set

  /// Forces an algorithm, by its name in `maniple bench --list`. Empty: MANIPLE_ALGORITHM, or else chosen by size and
  /// topology.
  std::string algorithm = {};
};

/// Options of new_group and split. Unset ones are inherited from the parent group.
struct GroupOptions {
  std::optional<Seconds> timeout = {};
  std::optional<TransportKind> transport = {};
  std::optional<std::string> algorithm = {};
};

/// Options of a single call: `world->all_reduce(x, ReduceOp::sum, {.timeout = 5s, .async_op = true})`.
struct CallOptions {
  std::optional<Seconds> timeout = {};  ///< default: the group's timeout
  /// For collectives on buffers. false: the call returns when this rank's result is in place, and its Work is done.
  /// true: it returns at once, and the Work is done later. isend and irecv always return at once; all other calls
  /// return when they have finished.
  bool async_op = false;
  /// For GPU memory: the operation runs in the order of this stream (a cudaStream_t), after work enqueued before the
  /// call and before work enqueued later. The call returns when the operation is enqueued; see work.h. Null: the
  /// default stream. With async_op the operation starts after the work already on the stream, but runs on a stream of
  /// the group; Work::wait orders the two.
  void* stream = nullptr;
  SourceLocation where = {};  ///< set by Maniple for calls that it makes itself; empty: the line of the call
};

}  // namespace maniple
