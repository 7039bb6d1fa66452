// NCCL as a plugin for GPU memory: each rank has its own GPU, on one host or several.
//
// Data moves as bytes. Operations that NCCL lacks (uneven parts) are composed of other operations in an NCCL group,
// which NCCL starts as one. NCCL does the reductions; docs/backends.md describes the effect on rounding.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "plugins/nccl/nccl_communicator.h"

namespace maniple::nccl_plugin {
namespace {

/// A reduction in NCCL's terms.
struct NcclReduction {
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;
  std::size_t elements = 1;    // elements of `type` in one element of the operation
  bool premultiplied = false;  // `op` is created for the call
};

std::optional<ncclDataType_t> type_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::int8: return ncclInt8;
    case DType::int16: return std::nullopt;  // NCCL lacks it
    case DType::int32: return ncclInt32;
    case DType::int64: return ncclInt64;
    case DType::uint8: return ncclUint8;
    case DType::float16: return ncclFloat16;
    case DType::bfloat16: return ncclBfloat16;
    case DType::float32: return ncclFloat32;
    case DType::float64: return ncclFloat64;
    case DType::bool8: return ncclUint8;
  }
  return std::nullopt;
}

bool is_floating(DType dtype) noexcept {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

/// "Or" is the maximum of the bytes and "and" the minimum, whatever number represents true.
std::optional<ncclRedOp_t> truth_op(ReduceOp::Kind kind) noexcept {
  switch (kind) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor: return ncclMax;
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band: return ncclMin;
    default: return std::nullopt;
  }
}

std::optional<NcclReduction> reduction_of(const Operation& op, int size) noexcept {
  ReduceOp::Kind kind = op.reduce.kind();
  if (kind == ReduceOp::avg && !op.last_stage) kind = ReduceOp::sum;
  if (kind == ReduceOp::premul_sum && !op.first_stage) kind = ReduceOp::sum;
  if (kind == ReduceOp::avg && op.ranks != 0 && op.ranks != size) return std::nullopt;  // NCCL divides by its own size
  if (size == 1 && kind != ReduceOp::premul_sum)
    return NcclReduction{ncclUint8, ncclSum, op.element(), false};  // a copy
  const std::optional<ncclDataType_t> type = type_of(op.dtype);
  if (!type) return std::nullopt;
  if (op.dtype == DType::bool8) {
    const std::optional<ncclRedOp_t> truth = truth_op(kind);
    return truth ? std::optional(NcclReduction{*type, *truth, 1, false}) : std::nullopt;
  }
  switch (kind) {
    case ReduceOp::sum: return NcclReduction{*type, ncclSum, 1, false};
    case ReduceOp::avg: return NcclReduction{*type, ncclAvg, 1, false};
    case ReduceOp::product: return NcclReduction{*type, ncclProd, 1, false};
    case ReduceOp::premul_sum:
      if (!is_floating(op.dtype) && !(std::abs(op.reduce.factor()) < 0x1p63)) return std::nullopt;
      return NcclReduction{*type, ncclSum, 1, true};
    case ReduceOp::min:
    case ReduceOp::max:
      if (is_floating(op.dtype)) return std::nullopt;  // NCCL prefers numbers to NaN, so the NaN is lost
      return NcclReduction{*type, kind == ReduceOp::min ? ncclMin : ncclMax, 1, false};
    default: return std::nullopt;  // band, bor, bxor
  }
}

bool is_reduction(Op op) noexcept { return op == Op::reduce || op == Op::all_reduce || op == Op::reduce_scatter; }

/// Whether the buffers are aligned to their elements. (A "misaligned address" error would make the device unusable for
/// the process.)
bool is_aligned(const Operation& op, int rank) noexcept {
  const auto good = [&](const std::byte* data, std::size_t count) {
    return count == 0 || (reinterpret_cast<std::uintptr_t>(data) & (op.element() - 1)) == 0;
  };
  if (op.op == Op::reduce_scatter) return good(op.in, op.parts.total()) && good(op.out, op.parts.count(rank));
  return good(op.in, op.count) && good(op.out, op.op == Op::reduce && op.root != rank ? 0 : op.count);
}

/// The factor of a premultiplied sum, in the operation's element type, as NCCL reads it.
union Factor {
  std::int8_t i8;
  std::uint8_t u8;
  std::int32_t i32;
  std::int64_t i64;
  float f32;
  double f64;
  __half f16;
  __nv_bfloat16 bf16;
  explicit Factor(DType dtype, double value) : f64(value) {
    const auto whole = is_floating(dtype) ? 0 : static_cast<std::int64_t>(value);
    switch (dtype) {
      case DType::int8: i8 = static_cast<std::int8_t>(whole); break;
      case DType::uint8: u8 = static_cast<std::uint8_t>(whole); break;
      case DType::int32: i32 = static_cast<std::int32_t>(whole); break;
      case DType::int64: i64 = whole; break;
      case DType::float32: f32 = static_cast<float>(value); break;
      case DType::float16: f16 = __float2half(static_cast<float>(value)); break;
      case DType::bfloat16: bf16 = __float2bfloat16(static_cast<float>(value)); break;
      default: break;
    }
  }
};

/// Whether an operation is composed of several calls.
bool is_composed(const Operation& op) noexcept {
  switch (op.op) {
    case Op::all_gather:
    case Op::reduce_scatter: return !op.parts.equal();
    case Op::gather: return !op.parts.equal() || nccl().gather == nullptr;
    case Op::scatter: return !op.parts.equal() || nccl().scatter == nullptr;
    case Op::all_to_all: return !op.in_parts.equal() || !op.out_parts.equal() || nccl().all_to_all == nullptr;
    default: return false;
  }
}

/// Calls that NCCL starts as one: several calls are enclosed in ncclGroupStart and ncclGroupEnd.
class Calls {
 public:
  Calls(ncclComm_t comm, int rank, int size, bool several) : comm_(comm), rank_(rank), size_(size), several_(several) {
    if (several) put(nccl().group_start());
  }
  ~Calls() { end(); }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  /// Starts the calls. Returns the first result other than success, if any.
  ncclResult_t end() noexcept {
    if (std::exchange(ended_, true)) return result_;
    if (several_) put(nccl().group_end());
    for (const ncclRedOp_t reduction : made_) nccl().free_reduction(reduction, comm_);
    return result_;
  }

  void add(const Operation& op, void* word) {
    stream_ = static_cast<cudaStream_t>(op.stream);
    element_ = op.element();
    switch (op.op) {
      case Op::broadcast: return broadcast(op.out, op.out, op.count, op.root);
      case Op::barrier: return put(nccl().all_reduce(word, word, 1, ncclUint8, ncclMax, comm_, stream_));
      case Op::reduce:
      case Op::all_reduce:
      case Op::reduce_scatter: return reduction(op);
      case Op::gather: return gather(op);
      case Op::all_gather: return all_gather(op);
      case Op::scatter: return scatter(op);
      default: return all_to_all(op);
    }
  }

  void add(const DeviceMessage& message, void* stream) {
    stream_ = static_cast<cudaStream_t>(stream);
    element_ = 1;
    if (message.send) {
      send(message.data, message.bytes, message.peer);
    } else {
      recv(message.data, message.bytes, message.peer);
    }
  }

 private:
  void put(ncclResult_t result) noexcept {
    if (result_ == ncclSuccess || result_ == ncclInProgress) result_ = result;
  }

  // An empty message needs no call: both sides know that it is empty.
  void send(const void* data, std::size_t count, int peer) {
    if (count > 0) put(nccl().send(data, count * element_, ncclUint8, peer, comm_, stream_));
  }
  void recv(void* data, std::size_t count, int peer) {
    if (count > 0) put(nccl().recv(data, count * element_, ncclUint8, peer, comm_, stream_));
  }
  void broadcast(const void* in, void* out, std::size_t count, int root) {
    if (count > 0) put(nccl().broadcast(in, out, count * element_, ncclUint8, root, comm_, stream_));
  }

  void reduction(const Operation& op) {
    NcclReduction how = reduction_of(op, size_).value();
    if (how.premultiplied) {
      Factor factor(op.dtype, op.reduce.factor());
      put(nccl().make_premultiplied(&how.op, &factor, how.type, ncclScalarHostImmediate, comm_));
      if (result_ != ncclSuccess && result_ != ncclInProgress) return;
      made_.push_back(how.op);
    }
    const std::size_t count = op.count * how.elements;
    if (op.op == Op::reduce_scatter) return reduce_scatter(op, how);
    if (count == 0) return;
    if (op.op == Op::all_reduce) {
      put(nccl().all_reduce(op.in, op.out, count, how.type, how.op, comm_, stream_));
    } else {
      std::byte* const out = rank_ == op.root ? op.out : nullptr;
      put(nccl().reduce(op.in, out, count, how.type, how.op, op.root, comm_, stream_));
    }
  }

  void reduce_scatter(const Operation& op, const NcclReduction& how) {
    if (op.parts.equal()) {
      const std::size_t count = op.parts.count(0) * how.elements;
      if (count > 0) put(nccl().reduce_scatter(op.in, op.out, count, how.type, how.op, comm_, stream_));
      return;
    }
    for (int to = 0; to < size_; ++to) {
      const std::size_t count = op.parts.count(to) * how.elements;
      if (count == 0) continue;
      const std::byte* const in = op.in + op.parts.offset(to) * element_;
      put(nccl().reduce(in, to == rank_ ? op.out : nullptr, count, how.type, how.op, to, comm_, stream_));
    }
  }

  void all_gather(const Operation& op) {
    if (op.parts.equal()) {
      const std::size_t bytes = op.parts.count(0) * element_;
      if (bytes > 0) put(nccl().all_gather(op.in, op.out, bytes, ncclUint8, comm_, stream_));
      return;
    }
    for (int from = 0; from < size_; ++from) {
      std::byte* const out = op.out + op.parts.offset(from) * element_;
      broadcast(from == rank_ ? op.in : out, out, op.parts.count(from), from);
    }
  }

  void gather(const Operation& op) {
    if (op.parts.equal() && nccl().gather != nullptr) {
      const std::size_t bytes = op.parts.count(0) * element_;
      if (bytes > 0) put(nccl().gather(op.in, op.out, bytes, ncclUint8, op.root, comm_, stream_));
      return;
    }
    const bool in_place = rank_ == op.root && op.in == op.out + op.parts.offset(rank_) * element_;
    if (!in_place) send(op.in, op.parts.count(rank_), op.root);
    if (rank_ != op.root) return;
    for (int from = 0; from < size_; ++from)
      if (from != rank_ || !in_place) recv(op.out + op.parts.offset(from) * element_, op.parts.count(from), from);
  }

  void scatter(const Operation& op) {
    if (op.parts.equal() && nccl().scatter != nullptr) {
      const std::size_t bytes = op.parts.count(0) * element_;
      if (bytes > 0) put(nccl().scatter(op.in, op.out, bytes, ncclUint8, op.root, comm_, stream_));
      return;
    }
    const bool in_place = rank_ == op.root && op.out == op.in + op.parts.offset(rank_) * element_;
    if (!in_place) recv(op.out, op.parts.count(rank_), op.root);
    if (rank_ != op.root) return;
    for (int to = 0; to < size_; ++to)
      if (to != rank_ || !in_place) send(op.in + op.parts.offset(to) * element_, op.parts.count(to), to);
  }

  void all_to_all(const Operation& op) {
    if (op.in_parts.equal() && op.out_parts.equal() && nccl().all_to_all != nullptr) {
      const std::size_t bytes = op.in_parts.count(0) * element_;
      if (bytes > 0) put(nccl().all_to_all(op.in, op.out, bytes, ncclUint8, comm_, stream_));
      return;
    }
    for (int peer = 0; peer < size_; ++peer) {
      send(op.in + op.in_parts.offset(peer) * element_, op.in_parts.count(peer), peer);
      recv(op.out + op.out_parts.offset(peer) * element_, op.out_parts.count(peer), peer);
    }
  }

  ncclComm_t comm_;
  int rank_;
  int size_;
  bool several_;
  cudaStream_t stream_ = nullptr;
  std::size_t element_ = 1;
  ncclResult_t result_ = ncclSuccess;
  std::vector<ncclRedOp_t> made_;  // reductions created for premultiplied sums
  bool ended_ = false;
};

/// Device memory that is registered with NCCL.
class Memory {
 public:
  Memory(std::shared_ptr<Communicator> communicator, std::size_t bytes) : communicator_(std::move(communicator)) {
    const std::string what = "allocating " + std::to_string(bytes) + " bytes on cuda:" + std::to_string(device());
    if (nccl().mem_alloc == nullptr) {
      check_cuda(::cudaMalloc(&data_, bytes), what);
    } else if (const ncclResult_t result = nccl().mem_alloc(&data_, bytes); result != ncclSuccess) {
      ::cudaGetLastError();
      data_ = nullptr;
      throw SystemError(what + " failed: NCCL says " + describe(result), 0);
    }
  }
  // Enqueued work may still use the memory. Unlike cudaFree, NCCL's free unmaps it without waiting.
  ~Memory() {
    try {
      on_device(device(), [] { ::cudaDeviceSynchronize(); }).wait();
      communicator_->deregister(data_);
      on_device(device(), [this] {
        if (nccl().mem_alloc == nullptr) {
          ::cudaFree(data_);
        } else {
          nccl().mem_free(data_);
        }
      }).wait();
    } catch (...) {  // no thread could be started: the memory leaks
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const noexcept { return data_; }

  void clear(std::size_t bytes) {
    cudaStream_t stream = nullptr;
    check_cuda(::cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    ::cudaMemsetAsync(data_, 0, bytes, stream);
    const cudaError_t result = ::cudaStreamSynchronize(stream);
    ::cudaStreamDestroy(stream);
    check_cuda(result, "cudaMemset");
  }

 private:
  int device() const noexcept { return communicator_->device(); }

  std::shared_ptr<Communicator> communicator_;
  void* data_ = nullptr;
};

class NcclPlugin final : public DevicePlugin {
 public:
  explicit NcclPlugin(const DeviceContext& context) : name_("NCCL " + version_text(nccl().version)) {
    if (!nccl().missing.empty()) throw Unsupported("the nccl backend cannot be used here: " + nccl().missing);
    // First do the steps that can fail on this rank alone, before waiting for other ranks.
    on_device(context.device, [] { check_cuda(::cudaFree(nullptr), "the first use of the device"); }).get();
    communicator_ = Communicator::make(context);
    on_device(context.device, [this] {
      word_ = std::make_unique<Memory>(communicator_, sizeof(std::uint32_t));
      word_->clear(sizeof(std::uint32_t));
    }).get();
  }
  ~NcclPlugin() override { communicator_->leave(); }

  std::string_view name() const noexcept override { return name_; }

  bool can(const Operation& operation) const noexcept override {
    // With one rank, NCCL 2.28 leaves the last element unchanged for an odd number of int64.
    if (operation.reduce.kind() == ReduceOp::premul_sum && communicator_->size() == 1) return false;
    if (is_reduction(operation.op)) return reduction_of(operation, communicator_->size()).has_value();
    return operation.op != Op::send && operation.op != Op::recv && operation.op != Op::allocate;
  }

  bool enqueue(const Operation& operation, void*) override {
    if (!can(operation)) throw Unsupported("NCCL lacks this reduction for the dtype; it goes through host memory");
    if (is_reduction(operation.op) && !is_aligned(operation, communicator_->rank()))
      throw InvalidArgument("NCCL reduces only memory that is aligned to its elements; use native, or copy it");
    if (batching_) {
      batch_.push_back(operation);
      return false;
    }
    start(is_composed(operation), [&](Calls& calls) { calls.add(operation, word_->data()); });
    return false;
  }

  // Batches are collected here, because NCCL's groups are bound to a thread and cannot be abandoned halfway.
  void begin_batch() override {
    batch_.clear();
    batching_ = true;
  }
  void end_batch(void*) override {
    batching_ = false;
    const std::vector<Operation> batch = std::exchange(batch_, {});
    if (batch.empty()) return;
    start(true, [&](Calls& calls) {
      for (const Operation& operation : batch) calls.add(operation, word_->data());
    });
  }

  bool has_messages() const noexcept override { return true; }
  void enqueue_messages(std::span<const DeviceMessage> messages, void* stream) override {
    int unmatched = 0;  // messages to this rank itself
    for (const DeviceMessage& message : messages)
      if (message.peer == communicator_->rank()) unmatched += message.send ? 1 : -1;
    if (unmatched != 0)
      throw InvalidArgument("NCCL takes a rank's message to itself only with send and recv in one batch");
    start(true, [&](Calls& calls) {
      for (const DeviceMessage& message : messages) calls.add(message, stream);
    });
  }

  bool can_capture() const noexcept override { return true; }

  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t, Deadline deadline) override {
    const std::size_t bytes = sizes[static_cast<std::size_t>(communicator_->rank())];
    const bool symmetric = std::all_of(sizes.begin(), sizes.end(), [&](std::size_t size) { return size == bytes; });
    if (bytes == 0) return {};
    const auto memory = std::make_shared<std::shared_ptr<Memory>>();
    communicator_->call_within(deadline, "allocate", [communicator = communicator_, memory, bytes, symmetric] {
      auto made = std::make_shared<Memory>(communicator, bytes);
      made->clear(bytes);
      communicator->register_memory(made->data(), bytes, symmetric);
      *memory = std::move(made);
    });
    return {(*memory)->data(), bytes, *memory};
  }

  DeviceFault fault() noexcept override { return communicator_->fault(); }
  void abort() noexcept override { communicator_->abort(); }

 private:
  template <class Body>
  void start(bool several, Body body) {
    communicator_->call("enqueueing", [&](ncclComm_t comm) {
      Calls calls(comm, communicator_->rank(), communicator_->size(), several);
      body(calls);
      return calls.end();
    });
  }

  std::string name_;
  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<Memory> word_;  // reduced by a barrier
  bool batching_ = false;
  std::vector<Operation> batch_;
};

std::string missing() { return nccl().missing; }
std::unique_ptr<DevicePlugin> make(const DeviceContext& context) { return std::make_unique<NcclPlugin>(context); }

}  // namespace
}  // namespace maniple::nccl_plugin

extern "C" MANIPLE_API const maniple::DevicePluginEntry* maniple_device_plugin_entry() {
  using namespace maniple::nccl_plugin;  // NOLINT: for this function
  static const std::string version = nccl().version == 0 ? std::string("NCCL") : "NCCL " + version_text(nccl().version);
  static const maniple::DevicePluginEntry entry = {
      maniple::kDevicePluginAbi, sizeof(maniple::Operation), version.c_str(), missing, nullptr, make};
  return &entry;
}
