// ProcessGroup: a group of ranks and its operations: collectives, point-to-point messages, objects, registered memory.
//
//   auto world = maniple::init();                          // env://, started by `maniple run`, torchrun, mpirun, ...
//   std::vector<float> x(1000, float(world->rank()));
//   world->all_reduce(buffer_of(x));                       // x now holds the sum on every rank
//
// Collectives: every rank of the group calls them in the same order, with matching arguments. If ranks disagree (on
// operation, dtype, count, root, reduce op or order), all of them get `Mismatch`, which lists what each rank called and
// where. `Timeout` names a rank that does not arrive; `PeerLost` names a rank that dies, at once.
//
// Synchronous and asynchronous calls work as in torch.distributed. By default a collective returns when this rank's
// result is in place, and the `Work` it returns is done. With `{.async_op = true}` it returns at once, and the Work is
// done later. A synchronous call on an idle group runs in the calling thread, without a thread switch.
//
// Ranks: `root`, `peer` and the ranks passed to new_group are group ranks, from 0 to size() - 1, as in MPI.
// `topology().members` maps them to global ranks.
//
// Threads: any thread may call a group, but the order of calls must be the same on all ranks. In practice that means
// one thread at a time; for concurrency, use one group per thread. send and recv are exempt from the order of
// collectives: they are matched by (source, tag), in the order posted.
//
// Errors: an error of the second family (see error.h) aborts the group on all ranks. On each rank one call, the current
// or the next, throws the cause itself. Later calls throw `Aborted` at once, repeating the cause. Create a new group,
// or exit. Errors name the line of the call, which is the default of the last argument, `where`. A function that makes
// calls for its own callers can pass their line.
//
// Lifetime: destroying a group never communicates and never blocks on peers. With operations enqueued on a GPU, which
// peers still need, it waits for those: until they complete, the group fails, or all other ranks have left. In a child
// of fork() every call throws: a forked child is not a rank.
//
// Arguments: counts are in elements. Tags are 0 or more. A timeout must not be negative or NaN. "In place" means that
// input and output are the same memory.
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

/// Makes this process a rank of the world. Returns when all `world_size` ranks have arrived, or throws `Timeout` naming
/// the missing ones. For a bad environment variable it throws `InvalidArgument` with the variable's name, its value and
/// what was expected.
///
/// A program started without a launcher gets a world of one rank and logs a warning. That is the case when neither
/// RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT nor a scheduler's variables are set, and the options give none of them.
std::shared_ptr<ProcessGroup> init(const InitOptions& options = {});

/// Like init above, over a store that the caller provides (tests, launchers). Uses keys under "maniple/". The options
/// must set `rank` and `world_size`.
std::shared_ptr<ProcessGroup> init(std::shared_ptr<Store> store, const InitOptions& options);

/// `peer` of recv and irecv: receive from any rank.
inline constexpr int kAnySource = -1;

/// One operation of batch_isend_irecv.
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

  /// Whether this rank is in the group. new_group and split also return a handle to ranks outside the group. On such a
  /// handle operations do nothing, whatever their arguments: they return at once (recv: -1; objects: empty; a Work that
  /// is done), and the first one logs a warning. store(), new_group and split throw `InvalidArgument`.
  bool is_member() const noexcept;
  /// Throws `InvalidArgument` on a rank outside the group. The text begins with `who`, the name of the caller that was
  /// given the group.
  void require_member(std::string_view who) const;

  const Topology& topology() const noexcept;
  const std::string& name() const noexcept;     ///< "world", "world/2", ...
  const std::string& backend() const noexcept;  ///< "native", "mpi", "cpu:native,cuda:nccl", ...: InitOptions::backend
  /// "loopback", "shm", "tcp", "shm+tcp", or the plugin's name; "none" for a single rank.
  std::string_view transport() const noexcept;
  Store& store();  ///< shared by the ranks of this group, with its own keys

  // ---- Groups of ranks -----------------------------------------------------------------------------------------

  /// Creates a group from some of this group's ranks, in the order given. Collective over *this* group: every rank
  /// passes the same list and options, or all get `Mismatch`. Ranks not in the list get a handle whose is_member() is
  /// false, never null.
  std::shared_ptr<ProcessGroup> new_group(std::span<const int> ranks, const GroupOptions& options = {},
                                          const CallOptions& call = {},
                                          const SourceLocation& where = SourceLocation::current());

  /// Creates one group per color. Ranks in it are ordered by (key, rank), and all of them pass the same options. A rank
  /// with a negative color is in no group: is_member() of its handle is false.
  std::shared_ptr<ProcessGroup> split(int color, int key = 0, const GroupOptions& options = {},
                                      const CallOptions& call = {},
                                      const SourceLocation& where = SourceLocation::current());

  /// Creates a group of the members that survive, in the same order, after this group has failed. Collective over the
  /// survivors: all ranks that have neither died nor left. If this group has not failed yet, the call makes it fail, so
  /// that ranks in one of its operations get `Aborted` and can call shrink() as well. All survivors get the same group,
  /// even if more ranks die meanwhile; a rank that dies later makes the new group fail, and shrink() of the new group
  /// repairs that. This group stays failed. Throws `Timeout`, naming the survivors that have not called it, and
  /// `Unsupported` with other backends than native. May be called from several ranks at different times; not together
  /// with other calls on this group.
  std::shared_ptr<ProcessGroup> shrink(const GroupOptions& options = {}, const CallOptions& call = {},
                                       const SourceLocation& where = SourceLocation::current());

  // ---- Collectives ---------------------------------------------------------------------------------------------

  /// Copies the root's buffer to all ranks.
  Work broadcast(Buffer buffer, int root, const CallOptions& options = {},
                 const SourceLocation& where = SourceLocation::current());

  /// `output` on the root becomes the reduction of all inputs. On other ranks `output` is ignored and may be empty.
  Work reduce(ConstBuffer input, Buffer output, int root, ReduceOp op = ReduceOp::sum, const CallOptions& options = {},
              const SourceLocation& where = SourceLocation::current());

  /// Every rank's buffer becomes the reduction of all buffers.
  Work all_reduce(Buffer buffer, ReduceOp op = ReduceOp::sum, const CallOptions& options = {},
                  const SourceLocation& where = SourceLocation::current());

  /// Like all_reduce above, out of place.
  Work all_reduce(ConstBuffer input, Buffer output, ReduceOp op = ReduceOp::sum, const CallOptions& options = {},
                  const SourceLocation& where = SourceLocation::current());

  /// Reduces many buffers, of any dtypes and counts, in one operation. Small buffers are packed together.
  Work all_reduce_coalesced(std::span<const Buffer> buffers, ReduceOp op = ReduceOp::sum,
                            const CallOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// `output` on the root receives the inputs of ranks 0, 1, ... one after the other. With `counts` (one per rank, the
  /// same list on all ranks) inputs may differ in length.
  Work gather(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts = {},
              const CallOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// Like gather, with the result on all ranks. `input` may be this rank's part of `output`.
  Work all_gather(ConstBuffer input, Buffer output, std::span<const std::size_t> counts = {},
                  const CallOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// Cuts the root's `input` into parts, one per rank, and sends part r to `output` on rank r. `output` on the root may
  /// be its part of `input`.
  Work scatter(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts = {},
               const CallOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// Reduces all inputs, cuts the result into parts, one per rank, and leaves part r in `output` on rank r. `output`
  /// may be this rank's part of `input`.
  Work reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op = ReduceOp::sum,
                      std::span<const std::size_t> counts = {}, const CallOptions& options = {},
                      const SourceLocation& where = SourceLocation::current());

  /// Part j of this rank's input becomes part r of rank j's output, where r is this rank. Without counts all parts are
  /// equal. With counts, `input_counts[j]` on this rank must equal `output_counts[r]` on rank j. Not in place.
  Work all_to_all(ConstBuffer input, Buffer output, std::span<const std::size_t> input_counts = {},
                  std::span<const std::size_t> output_counts = {}, const CallOptions& options = {},
                  const SourceLocation& where = SourceLocation::current());

  /// Returns when all ranks have called it.
  Work barrier(const CallOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// A barrier with its own limit. When the limit passes, it throws `Timeout` naming every missing rank and leaves the
  /// group usable. It goes through the store, so it is slow (a millisecond) but works even while collectives are stuck.
  /// If a rank dies, it throws `PeerLost`, like other operations.
  void monitored_barrier(Seconds timeout, const CallOptions& options = {},
                         const SourceLocation& where = SourceLocation::current());

  // ---- Point to point ------------------------------------------------------------------------------------------

  /// Returns when the buffer may be reused, which may be before the receiver has the message.
  void send(ConstBuffer buffer, int peer, int tag = 0, const CallOptions& options = {},
            const SourceLocation& where = SourceLocation::current());
  Work isend(ConstBuffer buffer, int peer, int tag = 0, const CallOptions& options = {},
             const SourceLocation& where = SourceLocation::current());

  /// Receives exactly `buffer.count` elements; a message of another length or dtype is a `Mismatch`. `peer` may be
  /// kAnySource. Returns the sender's rank.
  int recv(Buffer buffer, int peer, int tag = 0, const CallOptions& options = {},
           const SourceLocation& where = SourceLocation::current());
  /// Sets `source`, if not null, to the sender's rank before the Work is done.
  Work irecv(Buffer buffer, int peer, int tag = 0, int* source = nullptr, const CallOptions& options = {},
             const SourceLocation& where = SourceLocation::current());

  /// Starts all operations together, so that no order of sends and receives can deadlock. Returns one Work per
  /// operation.
  std::vector<Work> batch_isend_irecv(std::span<const PointToPoint> operations, const CallOptions& options = {},
                                      const SourceLocation& where = SourceLocation::current());

  // ---- Objects: bytes of any length, different on every rank ---------------------------------------------------

  std::string broadcast_object(std::string_view object, int root, const CallOptions& options = {},
                               const SourceLocation& where = SourceLocation::current());
  std::vector<std::string> gather_objects(
      std::string_view object, int root, const CallOptions& options = {},
      const SourceLocation& where = SourceLocation::current());  ///< empty except on root
  std::vector<std::string> all_gather_objects(std::string_view object, const CallOptions& options = {},
                                              const SourceLocation& where = SourceLocation::current());
  std::string scatter_objects(std::span<const std::string> objects, int root, const CallOptions& options = {},
                              const SourceLocation& where = SourceLocation::current());

  // ---- Memory --------------------------------------------------------------------------------------------------

  /// Allocates memory that every rank of this host maps, so that collectives on it copy nothing. Collective over the
  /// group; sizes may differ. Zeroed and page-aligned. Each rank's memory is freed when that rank drops its last
  /// handle.
  RegisteredMemory allocate(std::size_t bytes, const CallOptions& options = {},
                            const SourceLocation& where = SourceLocation::current());
  /// Like allocate above, in GPU memory; needs the backend cuda or nccl. In one collective, either all ranks pass
  /// memory of one such allocation, or none does.
  RegisteredMemory allocate(std::size_t bytes, Device device, const CallOptions& options = {},
                            const SourceLocation& where = SourceLocation::current());
  /// Allocates memory that exists once per host: all ranks of this group on a host get the same pages, as with
  /// MPI_Win_allocate_shared. Collective over the group; all ranks pass the same size. Zeroed and page-aligned; freed
  /// when the last rank drops its handle. Ranks coordinate their writes themselves, with barriers. Operations treat it
  /// as ordinary memory. Throws `Unsupported` where the ranks of a host do not share memory: with backends other than
  /// native, and with transport tcp.
  RegisteredMemory allocate_shared(std::size_t bytes, const CallOptions& options = {},
                                   const SourceLocation& where = SourceLocation::current());

  // ---- Ends ----------------------------------------------------------------------------------------------------

  /// Makes every rank's current and later calls on this group fail with `Aborted`. May be called from any thread, at
  /// any time.
  void abort(const std::string& reason);

  /// The first cause if the group has been aborted, otherwise null.
  std::exception_ptr error() const;

  /// The last operations of this rank, oldest first, one line each. Paste them into bug reports.
  std::vector<std::string> recent_operations() const;

  explicit ProcessGroup(std::unique_ptr<detail::GroupImpl> impl);  ///< internal, like impl()
  detail::GroupImpl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<detail::GroupImpl> impl_;
};

}  // namespace maniple
