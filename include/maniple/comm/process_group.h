// A group of ranks and its communication: collectives, point-to-point messages, objects, registered memory.
//
//   auto world = maniple::init();                          // env://, started by `maniple run`, torchrun, mpirun, ...
//   std::vector<float> x(1000, float(world->rank()));
//   world->all_reduce(buffer_of(x));                       // x now holds the sum on every rank
//
// Contract of every collective: all ranks of the group call it, with matching arguments, in the same order. Ranks that
// disagree (another operation, dtype, count, root, reduce op, order) all get `Mismatch`, which lists what each rank
// called and where. A rank that does not arrive is named by `Timeout`; one that dies, by `PeerLost`, at once.
//
// Synchronous and asynchronous, as in torch.distributed: a collective returns when this rank's result is in place, and
// the `Work` that it returns is done; with `{.async_op = true}` it returns at once, and the Work is done later. A
// synchronous call on an idle group runs in the calling thread and costs no thread switch.
//
// Ranks: `root` and `peer`, and the ranks that new_group takes, are ranks of this group, from 0 to size() - 1, as in
// MPI. `topology().members` has their ranks in the world.
//
// Threads: a group may be used from several threads, but as the order of calls must be the same on all ranks, only
// one at a time in practice; use one group per thread for concurrency. send and recv are exempt from the order of
// collectives: they are matched by (source, tag) in the order posted.
//
// After an error of the second family (see error.h) the group is aborted on all ranks: on each, one call throws the
// cause as it is (the one under way, or the next), and later calls throw `Aborted` at once, repeating it. Make a new
// group, or end. Destroying a group never communicates and never blocks on peers. In a child of fork() every call
// throws: a forked child is not a rank.
//
// Tags are 0 or more. A time-out is not negative; NaN is none.
// Counts are in elements. "In place" means that input and output are the same memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/comm/options.h>
#include <maniple/comm/registered_memory.h>
#include <maniple/comm/source_location.h>
#include <maniple/comm/store.h>
#include <maniple/comm/topology.h>
#include <maniple/comm/types.h>
#include <maniple/comm/work.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

class ProcessGroup;
namespace detail {
class GroupImpl;
}

/// Makes this process a rank of the world: waits until all `world_size` ranks have arrived, or throws `Timeout` naming
/// those that have not. Throws `InvalidArgument` naming the variable, what it holds and what was expected.
///
/// A program that was started by itself, with neither RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT nor a scheduler's
/// variables set and none of them given in the options, gets a world of one rank; the log says so.
std::shared_ptr<ProcessGroup> init(const InitOptions& options = {});

/// The same over a store that the program brings along (tests, launchers). Uses keys under "maniple/".
std::shared_ptr<ProcessGroup> init(std::shared_ptr<Store> store, const InitOptions& options);

inline constexpr int kAnySource = -1;

/// One element of a batch of point-to-point operations.
struct PointToPoint {
  static PointToPoint send(ConstBuffer buffer, int peer, int tag = 0) { return {Op::send, buffer, {}, peer, tag}; }
  static PointToPoint recv(Buffer buffer, int peer, int tag = 0) { return {Op::recv, {}, buffer, peer, tag}; }

  Op op = Op::send;
  ConstBuffer out = {};  ///< for send
  Buffer in = {};        ///< for recv
  int peer = 0;
  int tag = 0;
};

class ProcessGroup {
 public:
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const noexcept;  ///< -1 outside the group
  int size() const noexcept;  ///< -1 outside the group

  /// Whether this rank is in the group. new_group and split give the ranks outside a handle, too. On it operations do
  /// nothing, whatever their arguments: they return at once (recv: -1; objects: empty; a Work that is done), and the
  /// first logs a warning. store(), new_group and split throw `InvalidArgument` there.
  bool is_member() const noexcept;
  /// Throws `InvalidArgument` outside the group; its text begins with `who`, what the group was given to.
  void require_member(std::string_view who) const;

  const Topology& topology() const noexcept;
  const std::string& name() const noexcept;     ///< "world", "world/2", ...
  const std::string& backend() const noexcept;  ///< "native"
  std::string_view transport() const noexcept;  ///< "loopback", "shm", "tcp", "shm+tcp", or "none" for one rank
  Store& store();                               ///< shared by the ranks of this group; keys of its own

  // ---- Groups of ranks -----------------------------------------------------------------------------------------

  /// A group of some of this group's ranks, in the order given. Collective over *this*; every rank passes the same
  /// list and options, or all get `Mismatch`. Ranks that are not in it get a handle that says so (is_member), never
  /// null.
  std::shared_ptr<ProcessGroup> new_group(std::span<const int> ranks, const GroupOptions& options = {},
                                          const CallOptions& call = {});

  /// One group for each colour; inside it ranks are ordered by (key, rank), and all pass the same options. A negative
  /// colour: none (is_member is false).
  std::shared_ptr<ProcessGroup> split(int color, int key = 0, const GroupOptions& options = {},
                                      const CallOptions& call = {});

  // ---- Collectives ---------------------------------------------------------------------------------------------

  /// The root's buffer is copied to all.
  Work broadcast(Buffer buffer, int root, const CallOptions& options = {});

  /// `output` on the root becomes the reduction of all inputs. Other ranks' outputs are ignored and may be empty.
  Work reduce(ConstBuffer input, Buffer output, int root, ReduceOp op = ReduceOp::sum, const CallOptions& options = {});

  /// Every rank's buffer becomes the reduction of all buffers.
  Work all_reduce(Buffer buffer, ReduceOp op = ReduceOp::sum, const CallOptions& options = {});

  /// The same, out of place.
  Work all_reduce(ConstBuffer input, Buffer output, ReduceOp op = ReduceOp::sum, const CallOptions& options = {});

  /// Many buffers, of any dtypes and counts, in one operation; small ones are packed together.
  Work all_reduce_coalesced(std::span<const Buffer> buffers, ReduceOp op = ReduceOp::sum,
                            const CallOptions& options = {});

  /// `output` on the root holds the inputs of rank 0, 1, ... one after the other. With `counts` (one for each rank,
  /// the same list on all ranks) inputs may differ in length.
  Work gather(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts = {},
              const CallOptions& options = {});

  /// gather, with the result on all ranks. `input` may be this rank's part of `output`.
  Work all_gather(ConstBuffer input, Buffer output, std::span<const std::size_t> counts = {},
                  const CallOptions& options = {});

  /// The root's `input` is cut into parts, one for each rank.
  Work scatter(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts = {},
               const CallOptions& options = {});

  /// The reduction of all inputs is cut into parts, one for each rank. `output` may be this rank's part of `input`.
  Work reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op = ReduceOp::sum,
                      std::span<const std::size_t> counts = {}, const CallOptions& options = {});

  /// Part j of this rank's input becomes part (this rank) of rank j's output. Without counts all parts are equal.
  /// With counts, `input_counts[j]` here must equal `output_counts[this rank]` on rank j. Not in place.
  Work all_to_all(ConstBuffer input, Buffer output, std::span<const std::size_t> input_counts = {},
                  std::span<const std::size_t> output_counts = {}, const CallOptions& options = {});

  /// Returns when all ranks have called it.
  Work barrier(const CallOptions& options = {});

  /// A barrier with a limit of its own that, when it passes, names every missing rank and leaves the group usable. Goes
  /// through the store, so it is slow (a millisecond) and works even while collectives are stuck. A rank that dies ends
  /// the wait with `PeerLost`, as everywhere.
  void monitored_barrier(Seconds timeout, const CallOptions& options = {});

  // ---- Point to point ------------------------------------------------------------------------------------------

  /// Returns when the buffer may be reused, which may be before the receiver has it.
  void send(ConstBuffer buffer, int peer, int tag = 0, const CallOptions& options = {});
  Work isend(ConstBuffer buffer, int peer, int tag = 0, const CallOptions& options = {});

  /// Receives exactly `buffer.count` elements; a message of another length or dtype is a `Mismatch`. `peer` may be
  /// kAnySource. Returns the sender's rank.
  int recv(Buffer buffer, int peer, int tag = 0, const CallOptions& options = {});
  /// `source`, if not null, is set to the sender's rank before the Work is done.
  Work irecv(Buffer buffer, int peer, int tag = 0, int* source = nullptr, const CallOptions& options = {});

  /// Starts them all together, so that no order of sends and receives can deadlock. One Work for each.
  std::vector<Work> batch_isend_irecv(std::span<const PointToPoint> operations, const CallOptions& options = {});

  // ---- Objects: bytes of any length, different on every rank ---------------------------------------------------

  std::string broadcast_object(std::string_view object, int root, const CallOptions& options = {});
  std::vector<std::string> gather_objects(std::string_view object, int root,
                                          const CallOptions& options = {});  ///< empty except on root
  std::vector<std::string> all_gather_objects(std::string_view object, const CallOptions& options = {});
  std::string scatter_objects(std::span<const std::string> objects, int root, const CallOptions& options = {});

  // ---- Memory --------------------------------------------------------------------------------------------------

  /// Memory that every rank of this host maps, so that collectives on it copy nothing. Collective over the group; sizes
  /// may differ. Zeroed, page-aligned. Freed when the last handle goes, on each rank for itself.
  RegisteredMemory allocate(std::size_t bytes, const CallOptions& options = {});
  /// The same in memory of a GPU, for the backends cuda and nccl. Either all ranks pass memory of one such allocation
  /// to a collective, or none does.
  RegisteredMemory allocate(std::size_t bytes, Device device, const CallOptions& options = {});
  /// Memory of which each host has one: all ranks of this group on a host get the same pages, as by
  /// MPI_Win_allocate_shared. Collective over the group; all pass the same size. Zeroed, page-aligned; freed when the
  /// last of them drops its handle. Who writes it when is for the ranks to agree on, by barriers; to operations it is
  /// ordinary memory. Throws `Unsupported` where ranks of a host share no memory: with other backends than native, and
  /// with transport tcp.
  RegisteredMemory allocate_shared(std::size_t bytes, const CallOptions& options = {});

  // ---- Ends ----------------------------------------------------------------------------------------------------

  /// Makes every rank's current and later calls on this group fail with `Aborted`. Any thread, any time.
  void abort(const std::string& reason);

  /// The cause if the group has been aborted, otherwise null.
  std::exception_ptr error() const;

  /// The last operations of this rank, oldest first, one line each: what people paste into bug reports.
  std::vector<std::string> recent_operations() const;

  explicit ProcessGroup(std::unique_ptr<detail::GroupImpl> impl);  ///< internal, like the next
  detail::GroupImpl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<detail::GroupImpl> impl_;
};

}  // namespace maniple
