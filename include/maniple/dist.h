// Tensor operations, named as in torch.distributed.
//
//   maniple::init_process_group();                       // env://: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   auto x = torch::ones({3}) * maniple::get_rank();
//   maniple::all_reduce(x);                              // x now holds the sum on every rank
//   maniple::broadcast(x, /*src=*/0);
//   auto work = maniple::all_reduce(x, maniple::ReduceOp::max, {.async_op = true});
//   ...
//   work.wait();                                         // x holds the maximum
//   maniple::destroy_process_group();
//
// Contract of all operations:
//
//   Groups      Without `.group` an operation works on the default group, the world of init_process_group. Every rank
//               of the group calls the same operations in the same order; if ranks disagree, all of them get
//               `Mismatch`, which lists the call of each. On a rank outside the group an operation does nothing,
//               whatever its arguments (recv returns -1, objects are empty, async_op returns a Work that is done). The
//               first such call logs a warning.
//   Ranks       `src`, `dst` and peers are global ranks in every group, as in torch.distributed. `GroupRank{r}` means
//               rank r of the group instead (torch.distributed: group_src and group_dst). A rank that is not in the
//               group is an `InvalidArgument`. Lists of tensors and objects have one element per rank *of the group*,
//               in the order of group ranks. (ProcessGroup, which this header builds on, takes only group ranks.)
//   async_op    false: the operation returns when this rank's result is in place, and the Work it returns is done.
//               true: it returns at once; the result is in place when wait() returns. The operation keeps its tensors
//               alive until then. Do not touch them meanwhile.
//   Tensors     Any strides: a tensor that is not contiguous travels through a contiguous copy, which is written back
//               before the Work is done. Dtypes: float16, bfloat16, float32, float64, int8, int16, int32, int64, uint8,
//               bool; complex tensors travel as pairs of reals (they can be added and averaged, not compared or
//               multiplied). Zero elements are fine. Tensors that require gradients are read and written as under
//               torch::NoGradGuard: nothing is recorded. A tensor that is undefined, sparse, quantized or on the meta
//               device is an `InvalidArgument`, which names the argument and the problem. A tensor on a device that the
//               group's backend cannot reach is `Unsupported`.
//   GPUs        An operation on GPU tensors runs in the order of LibTorch's current stream and returns when it is
//               enqueued; the host does not wait. With async_op it runs concurrently with that stream, and Work::wait
//               orders the two.
//   Shapes      The number of elements and the dtype must match. Shapes may differ; elements go in row-major order.
//   Errors      See comm/error.h. When a rank dies, all other ranks get `PeerLost`, which names it, at once. Errors
//               name the line of the call, which is the default of the last argument, `where`.
//   Threads     One at a time per group; see comm/process_group.h.
//
// A process has one default group. Without LibTorch, use comm/process_group.h.
#pragma once

#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <maniple/comm.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

// ---- The default group -------------------------------------------------------------------------------------------

/// Initialises the world (see InitOptions in comm/options.h) and makes it the default group. Throws `InvalidArgument`
/// if there is already a default group. After destroy_process_group, a new one may be created.
void init_process_group(const InitOptions& options = {});

/// Like init_process_group above, over a store that the caller provides.
void init_process_group(std::shared_ptr<Store> store, const InitOptions& options);

/// Makes an existing group, such as the result of maniple::init, the default group.
void init_process_group(std::shared_ptr<ProcessGroup> group);

/// Drops the default group, which is destroyed when its last other owner drops it. Never communicates, so other ranks
/// notice a rank that leaves early; call barrier() first to leave together. Does nothing without a default group.
void destroy_process_group();

constexpr bool is_available() noexcept { return true; }  ///< always true: a build with this header has the operations
bool is_initialized() noexcept;
bool is_backend_available(std::string_view backend) noexcept;  ///< whether init_process_group accepts this name

/// The default group. Throws `InvalidArgument` if there is none; the text explains how to create it.
std::shared_ptr<ProcessGroup> get_default_group();

/// Properties of the group, or of the default group if null. The rank and the size are -1 on a rank outside the group.
int get_rank(const std::shared_ptr<ProcessGroup>& group = nullptr);
int get_world_size(const std::shared_ptr<ProcessGroup>& group = nullptr);
std::string get_backend(const std::shared_ptr<ProcessGroup>& group = nullptr);

/// Converts a global rank to a group rank, and back. Throws `InvalidArgument` if there is no such rank, or if this rank
/// is not in the group.
int get_group_rank(const std::shared_ptr<ProcessGroup>& group, int global_rank);
int get_global_rank(const std::shared_ptr<ProcessGroup>& group, int group_rank);

/// Creates a group from some ranks of the default group, in the order given. All ranks of the default group call it
/// with the same list and options. Ranks not in the list get a handle whose is_member() is false, never null.
std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks, const GroupOptions& options = {},
                                        const SourceLocation& where = SourceLocation::current());

/// Arranges the ranks of the default group as a grid with named dimensions; see comm/mesh.h. Collective.
///
///   const auto mesh = maniple::init_device_mesh({{"pipe", 2}, {"data", -1}});
DeviceMesh init_device_mesh(std::vector<MeshDimension> dimensions, const GroupOptions& options = {},
                            const SourceLocation& where = SourceLocation::current());

// ---- This process ---------------------------------------------------------------------------------------------------

/// This rank's number on its host, and the host's number. Taken from LOCAL_RANK, and from NODE_RANK or GROUP_RANK, if a
/// launcher has set them, so both work before init_process_group. Otherwise taken from the default group's topology.
int get_local_rank();
int get_node_rank();

/// Whether this is rank 0 of the default group. Without a default group: whether RANK is 0 or unset.
bool is_main_process();

/// In the main process only: prints all parts with `<<` and a newline to standard output.
template <class... Parts>
void print_once(const Parts&... parts) {
  if (!is_main_process()) return;
  std::ostringstream text;
  (text << ... << parts) << '\n';
  std::cout << text.str() << std::flush;
}

// ---- Options and arguments ------------------------------------------------------------------------------------------

/// A rank within the group that an operation works on:
///
///   broadcast(x, 2, {.group = pair});               // from global rank 2
///   broadcast(x, GroupRank{1}, {.group = pair});    // from rank 1 of the pair; PyTorch: group_src=1
struct GroupRank {
  int rank = 0;
};

/// The type of `src`, `dst` and `peer`: a global rank as a plain int, or a GroupRank.
class PeerRank {
 public:
  constexpr PeerRank(int global_rank) noexcept : rank_(global_rank) {}
  constexpr PeerRank(GroupRank group_rank) noexcept : rank_(group_rank.rank), is_group_rank_(true) {}
  constexpr int rank() const noexcept { return rank_; }
  constexpr bool is_group_rank() const noexcept { return is_group_rank_; }

 private:
  int rank_;
  bool is_group_rank_ = false;
};

/// Options of a single operation.
struct DistOptions {
  std::shared_ptr<ProcessGroup> group = nullptr;  ///< null: the default group
  bool async_op = false;
  std::optional<Seconds> timeout = {};  ///< default: the group's timeout
  SourceLocation where = {};            ///< set by Maniple for calls that it makes itself; empty: the line of the call
};

// ---- Collectives -------------------------------------------------------------------------------------------------

/// Every rank's tensor becomes a copy of the tensor on rank `src`.
Work broadcast(const torch::Tensor& tensor, PeerRank src, const DistOptions& options = {},
               const SourceLocation& where = SourceLocation::current());

/// The tensor on rank `dst` becomes the reduction of all ranks' tensors; the other tensors do not change.
Work reduce(const torch::Tensor& tensor, PeerRank dst, ReduceOp op = ReduceOp::sum, const DistOptions& options = {},
            const SourceLocation& where = SourceLocation::current());

/// Every rank's tensor becomes the reduction of all ranks' tensors.
Work all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::sum, const DistOptions& options = {},
                const SourceLocation& where = SourceLocation::current());

/// Reduces many tensors, of any dtypes and sizes, in one operation. Small tensors are packed together.
Work all_reduce_coalesced(const std::vector<torch::Tensor>& tensors, ReduceOp op = ReduceOp::sum,
                          const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// `gather_list` on rank `dst` receives the tensors of group ranks 0, 1, ...; on other ranks it is empty. All tensors
/// have the same number of elements.
Work gather(const torch::Tensor& tensor, const std::vector<torch::Tensor>& gather_list, PeerRank dst = 0,
            const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// `tensor_list` receives the tensors of group ranks 0, 1, ... on every rank. Tensors in the list may differ in size:
/// element r must have the number of elements that rank r sends.
Work all_gather(const std::vector<torch::Tensor>& tensor_list, const torch::Tensor& tensor,
                const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// Like all_gather, into one tensor with world_size times the elements of `input`.
Work all_gather_into_tensor(const torch::Tensor& output, const torch::Tensor& input, const DistOptions& options = {},
                            const SourceLocation& where = SourceLocation::current());

/// `tensor` becomes this rank's element of `scatter_list` on rank `src`; on other ranks the list is empty.
Work scatter(const torch::Tensor& tensor, const std::vector<torch::Tensor>& scatter_list, PeerRank src = 0,
             const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// `output` on rank r becomes the reduction of all ranks' `input_list[r]`. Elements of the list may differ in size.
Work reduce_scatter(const torch::Tensor& output, const std::vector<torch::Tensor>& input_list,
                    ReduceOp op = ReduceOp::sum, const DistOptions& options = {},
                    const SourceLocation& where = SourceLocation::current());

/// Like reduce_scatter, from one tensor with world_size times the elements of `output`.
Work reduce_scatter_tensor(const torch::Tensor& output, const torch::Tensor& input, ReduceOp op = ReduceOp::sum,
                           const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// `output_list[j]` becomes `input_list[this rank]` of rank j. Sizes may differ for every pair.
Work all_to_all(const std::vector<torch::Tensor>& output_list, const std::vector<torch::Tensor>& input_list,
                const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// Like all_to_all, with tensors cut along their first dimension: into equal parts, or into parts with the given
/// numbers of rows.
Work all_to_all_single(const torch::Tensor& output, const torch::Tensor& input,
                       const std::vector<std::int64_t>& output_split_sizes = {},
                       const std::vector<std::int64_t>& input_split_sizes = {}, const DistOptions& options = {},
                       const SourceLocation& where = SourceLocation::current());

/// Done when all ranks have called it.
Work barrier(const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

/// A barrier that, when it fails, names every rank that did not arrive and leaves the group usable. Slower than barrier
/// (a millisecond). The limit is `options.timeout`, or 30 s by default. Always synchronous.
void monitored_barrier(const DistOptions& options = {}, const SourceLocation& where = SourceLocation::current());

// ---- Point to point ----------------------------------------------------------------------------------------------

inline constexpr int kAnyRank = kAnySource;  ///< receive from any rank, in the order of arrival

void send(const torch::Tensor& tensor, PeerRank dst, int tag = 0, const DistOptions& options = {},
          const SourceLocation& where = SourceLocation::current());
/// Returns the sender's global rank.
int recv(const torch::Tensor& tensor, PeerRank src = kAnyRank, int tag = 0, const DistOptions& options = {},
         const SourceLocation& where = SourceLocation::current());
Work isend(const torch::Tensor& tensor, PeerRank dst, int tag = 0, const DistOptions& options = {},
           const SourceLocation& where = SourceLocation::current());
Work irecv(const torch::Tensor& tensor, PeerRank src = kAnyRank, int tag = 0, const DistOptions& options = {},
           const SourceLocation& where = SourceLocation::current());

/// One operation of a batch: P2POp::isend(tensor, peer) or P2POp::irecv(tensor, peer).
struct P2POp {
  static P2POp isend(torch::Tensor tensor, PeerRank peer, int tag = 0) {
    return {Op::send, std::move(tensor), peer, tag};
  }
  static P2POp irecv(torch::Tensor tensor, PeerRank peer, int tag = 0) {
    return {Op::recv, std::move(tensor), peer, tag};
  }
  Op op;
  torch::Tensor tensor;
  PeerRank peer;
  int tag;
};

/// Starts all operations together, so that no order of sends and receives can deadlock. Returns one Work per operation.
std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const DistOptions& options = {},
                                    const SourceLocation& where = SourceLocation::current());

// ---- Objects: bytes of any length, different on every rank. Synchronous. --------------------------------------------

std::string broadcast_object(std::string_view object, PeerRank src = 0, const DistOptions& options = {},
                             const SourceLocation& where = SourceLocation::current());
std::vector<std::string> gather_object(
    std::string_view object, PeerRank dst = 0, const DistOptions& options = {},
    const SourceLocation& where = SourceLocation::current());  ///< empty except on dst
std::vector<std::string> all_gather_object(std::string_view object, const DistOptions& options = {},
                                           const SourceLocation& where = SourceLocation::current());
std::string scatter_object(const std::vector<std::string>& objects, PeerRank src = 0, const DistOptions& options = {},
                           const SourceLocation& where = SourceLocation::current());

// ---- One rank before the others -------------------------------------------------------------------------------------

namespace detail {
void run_main_process_first(const std::function<void()>& function, const DistOptions& options,
                            const SourceLocation& where);
}

/// Calls `function` on rank 0 of the group, then on all other ranks, and returns its result. Use it for a download or a
/// cache that one process creates and all use.
///
///   auto data = maniple::main_process_first([] { return load_or_download("data"); });
///
/// Collective. The other ranks wait for rank 0 until the timeout. If `function` throws on rank 0, the exception is
/// thrown there, the other ranks get `Aborted` with its text and do not call `function`, and the group stays usable. If
/// it throws on another rank, only that rank is affected. Without .group and without a default group, it is just
/// called. Throws `InvalidArgument` on a rank outside the group.
template <class Function>
std::invoke_result_t<Function&> main_process_first(Function&& function, const DistOptions& options = {},
                                                   const SourceLocation& where = SourceLocation::current()) {
  using Result = std::invoke_result_t<Function&>;
  if constexpr (std::is_void_v<Result>) {
    detail::run_main_process_first([&] { function(); }, options, where);
  } else {
    std::optional<Result> result;
    detail::run_main_process_first([&] { result.emplace(function()); }, options, where);
    return std::move(*result);
  }
}

}  // namespace maniple
