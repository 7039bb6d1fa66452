// Operations on tensors, spelt as torch.distributed spells them.
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
// What all operations have in common:
//
//   Groups      Without `.group` an operation works on the default group, the world of init_process_group. Every rank
//               of the group calls the same operations in the same order; ranks that disagree all get `Mismatch`, which
//               lists what each called. On a rank that is not in the group an operation does nothing, whatever its
//               arguments (recv returns -1, objects are empty, async_op gives a Work that is done); the first logs a
//               warning.
//   Ranks       `src`, `dst` and peers are global ranks, those of the world, in every group, as in torch.distributed.
//               `GroupRank{r}` is rank r of the group instead (group_src and group_dst there). One that is not in the
//               group is an `InvalidArgument`. Lists of tensors and objects have one element for each rank *of the
//               group*, in the order of group ranks. (ProcessGroup itself, below this header, knows group ranks only.)
//   async_op    false: the operation returns when this rank's result is in place, and the Work it returns is done.
//               true: it returns at once; when wait() returns, the result is in place. Tensors are kept alive until
//               then. Do not touch them meanwhile.
//   Tensors     Any strides: a tensor that is not contiguous travels through a contiguous copy and is written back
//               before the Work is done. Any of float16, bfloat16, float32, float64, int8, int16, int32, int64, uint8,
//               bool; complex tensors travel as pairs of reals (they can be added and averaged, not compared or
//               multiplied). Zero elements are fine. Tensors that require gradients are read and written as under
//               torch::NoGradGuard: nothing is recorded. `InvalidArgument` names the argument and what is wrong with it
//               when a tensor is undefined, sparse, quantized or on the meta device; `Unsupported` when it is on a
//               device the group's backend cannot reach.
//   GPUs        An operation on tensors of a GPU runs in the order of LibTorch's current stream, and the host does not
//               wait: it returns when the operation is enqueued. With async_op it runs beside that stream, and
//               Work::wait orders the two.
//   Shapes      Only the number of elements and the dtype must fit; shapes may differ, elements go in row-major order.
//   Errors      As in comm/error.h. A rank that dies is named on all others at once by `PeerLost`.
//   Threads     As in comm/process_group.h: one at a time for each group.
//
// There is one default group in a process. Without LibTorch, use comm/process_group.h, which this header builds on.
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
/// when there is one already; after destroy_process_group another may be made.
void init_process_group(const InitOptions& options = {});

/// The same over a store that the program brings along.
void init_process_group(std::shared_ptr<Store> store, const InitOptions& options);

/// Makes a group that maniple::init gave the default group.
void init_process_group(std::shared_ptr<ProcessGroup> group);

/// Drops the default group: it is destroyed once nobody else holds it. Never communicates, so a rank that leaves early
/// is noticed by the others; call barrier() first where all should leave together. Without a default group it does
/// nothing.
void destroy_process_group();

constexpr bool is_available() noexcept { return true; }  ///< a build with this header has the operations
bool is_initialized() noexcept;
bool is_backend_available(std::string_view backend) noexcept;  ///< whether init_process_group accepts this name

/// The default group; throws `InvalidArgument` when there is none, saying how to get one.
std::shared_ptr<ProcessGroup> get_default_group();

/// Of the group, or of the default group when null. The first two are -1 on a rank that is not in the group.
int get_rank(const std::shared_ptr<ProcessGroup>& group = nullptr);
int get_world_size(const std::shared_ptr<ProcessGroup>& group = nullptr);
std::string get_backend(const std::shared_ptr<ProcessGroup>& group = nullptr);

/// From a rank of the world to a rank of the group and back. Throws `InvalidArgument` if there is no such rank,
/// or if this one is not in the group.
int get_group_rank(const std::shared_ptr<ProcessGroup>& group, int global_rank);
int get_global_rank(const std::shared_ptr<ProcessGroup>& group, int group_rank);

/// A group of some ranks of the default group, in the order given. All ranks of the default group call it with the same
/// list and options; those that are not in it get a handle of which is_member() is false, never null.
std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks, const GroupOptions& options = {},
                                        const SourceLocation& where = SourceLocation::current());

/// The ranks of the default group as a grid with named dimensions: see comm/mesh.h. Collective.
///
///   const auto mesh = maniple::init_device_mesh({{"pipe", 2}, {"data", -1}});
DeviceMesh init_device_mesh(std::vector<MeshDimension> dimensions, const GroupOptions& options = {},
                            const SourceLocation& where = SourceLocation::current());

// ---- This process ---------------------------------------------------------------------------------------------------

/// The rank among those of this host, and the number of this host: LOCAL_RANK, and NODE_RANK or GROUP_RANK, as
/// launchers set them (so both can be asked for before init_process_group), otherwise as found by the default group.
int get_local_rank();
int get_node_rank();

/// Whether this is rank 0 of the default group. Without one: whether RANK is 0 or not set.
bool is_main_process();

/// Prints the parts, one after the other as `<<` prints them, and a newline on standard output; in the main process
/// only.
template <class... Parts>
void print_once(const Parts&... parts) {
  if (!is_main_process()) return;
  std::ostringstream text;
  (text << ... << parts) << '\n';
  std::cout << text.str() << std::flush;
}

// ---- Options and arguments ------------------------------------------------------------------------------------------

/// A rank of the group that an operation works on:
///
///   broadcast(x, 2, {.group = pair});               // from global rank 2
///   broadcast(x, GroupRank{1}, {.group = pair});    // from rank 1 of the pair; PyTorch: group_src=1
struct GroupRank {
  int rank = 0;
};

/// What `src`, `dst` and `peer` take: a global rank as a plain int, or a GroupRank.
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

struct DistOptions {
  std::shared_ptr<ProcessGroup> group = nullptr;  ///< null: the default group
  bool async_op = false;
  std::optional<Seconds> timeout = {};               ///< default: that of the group
  SourceLocation where = SourceLocation::current();  ///< for error messages; leave it alone
};

// ---- Collectives -------------------------------------------------------------------------------------------------

/// Every rank's tensor becomes that of rank `src`.
Work broadcast(const torch::Tensor& tensor, PeerRank src, const DistOptions& options = {});

/// The tensor of rank `dst` becomes the reduction of all; those of the other ranks stay as they are.
Work reduce(const torch::Tensor& tensor, PeerRank dst, ReduceOp op = ReduceOp::sum, const DistOptions& options = {});

/// Every rank's tensor becomes the reduction of all.
Work all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::sum, const DistOptions& options = {});

/// The same for many tensors, of any dtypes and sizes, in one operation; small ones are packed together.
Work all_reduce_coalesced(const std::vector<torch::Tensor>& tensors, ReduceOp op = ReduceOp::sum,
                          const DistOptions& options = {});

/// `gather_list` on rank `dst` receives the tensors of group rank 0, 1, ...; elsewhere it is empty. All have the same
/// number of elements.
Work gather(const torch::Tensor& tensor, const std::vector<torch::Tensor>& gather_list, PeerRank dst = 0,
            const DistOptions& options = {});

/// `tensor_list` receives the tensors of group rank 0, 1, ... on every rank. The tensors of the list may have different
/// sizes; that of rank r must have as many elements as rank r sends.
Work all_gather(const std::vector<torch::Tensor>& tensor_list, const torch::Tensor& tensor,
                const DistOptions& options = {});

/// The same into one tensor of world_size times as many elements.
Work all_gather_into_tensor(const torch::Tensor& output, const torch::Tensor& input, const DistOptions& options = {});

/// `tensor` becomes this rank's element of the list that rank `src` gives; elsewhere the list is empty.
Work scatter(const torch::Tensor& tensor, const std::vector<torch::Tensor>& scatter_list, PeerRank src = 0,
             const DistOptions& options = {});

/// `output` on rank r becomes the reduction of all ranks' `input_list[r]`, which may have different sizes for different
/// r.
Work reduce_scatter(const torch::Tensor& output, const std::vector<torch::Tensor>& input_list,
                    ReduceOp op = ReduceOp::sum, const DistOptions& options = {});

/// The same from one tensor of world_size times as many elements.
Work reduce_scatter_tensor(const torch::Tensor& output, const torch::Tensor& input, ReduceOp op = ReduceOp::sum,
                           const DistOptions& options = {});

/// `output_list[j]` becomes rank j's `input_list[this rank]`; sizes may differ for every pair.
Work all_to_all(const std::vector<torch::Tensor>& output_list, const std::vector<torch::Tensor>& input_list,
                const DistOptions& options = {});

/// The same with tensors that are cut along their first dimension: into equal parts, or into parts of the given numbers
/// of rows.
Work all_to_all_single(const torch::Tensor& output, const torch::Tensor& input,
                       const std::vector<std::int64_t>& output_split_sizes = {},
                       const std::vector<std::int64_t>& input_split_sizes = {}, const DistOptions& options = {});

/// Done when all ranks have called it.
Work barrier(const DistOptions& options = {});

/// A barrier that, when it fails, names every rank that did not arrive and leaves the group usable. Slower than barrier
/// (a millisecond). Its limit is `options.timeout`, or 30 s; it is always synchronous.
void monitored_barrier(const DistOptions& options = {});

// ---- Point to point ----------------------------------------------------------------------------------------------

inline constexpr int kAnyRank = kAnySource;  ///< recv from whoever sends first

void send(const torch::Tensor& tensor, PeerRank dst, int tag = 0, const DistOptions& options = {});
/// Returns the sender's global rank.
int recv(const torch::Tensor& tensor, PeerRank src = kAnyRank, int tag = 0, const DistOptions& options = {});
Work isend(const torch::Tensor& tensor, PeerRank dst, int tag = 0, const DistOptions& options = {});
Work irecv(const torch::Tensor& tensor, PeerRank src = kAnyRank, int tag = 0, const DistOptions& options = {});

/// One element of a batch: P2POp::isend(tensor, peer) or P2POp::irecv(tensor, peer).
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

/// Starts them all together, so that no order of sends and receives can deadlock. One Work for each.
std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const DistOptions& options = {});

// ---- Objects: bytes of any length, different on every rank. Synchronous. --------------------------------------------

std::string broadcast_object(std::string_view object, PeerRank src = 0, const DistOptions& options = {});
std::vector<std::string> gather_object(std::string_view object, PeerRank dst = 0,
                                       const DistOptions& options = {});  ///< empty except on dst
std::vector<std::string> all_gather_object(std::string_view object, const DistOptions& options = {});
std::string scatter_object(const std::vector<std::string>& objects, PeerRank src = 0, const DistOptions& options = {});

// ---- One rank before the others -------------------------------------------------------------------------------------

namespace detail {
void run_main_process_first(const std::function<void()>& function, const DistOptions& options);
}

/// Calls `function` on rank 0 of the group, then on all others, and returns what it returns: for a download or a cache
/// that one process makes and all use.
///
///   auto data = maniple::main_process_first([] { return load_or_download("data"); });
///
/// What it throws on rank 0 is thrown there, and as `Aborted` with its text on all others, which do not call it; the
/// group stays usable. What it throws on another rank concerns that rank alone. The others wait for rank 0 as long as
/// the timeout allows. Without a default group, and without .group, it is just called. Collective.
template <class Function>
std::invoke_result_t<Function&> main_process_first(Function&& function, const DistOptions& options = {}) {
  using Result = std::invoke_result_t<Function&>;
  if constexpr (std::is_void_v<Result>) {
    detail::run_main_process_first([&] { function(); }, options);
  } else {
    std::optional<Result> result;
    detail::run_main_process_first([&] { result.emplace(function()); }, options);
    return std::move(*result);
  }
}

}  // namespace maniple
