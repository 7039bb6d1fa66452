#include "plugins/cuda/cuda_group.h"

#include <algorithm>
#include <set>

#include "plugins/cuda/runtime.h"

namespace maniple::cuda_plugin {
namespace {

constexpr std::size_t kSlotBytes = std::size_t{32} << 20;    // per rank, up to 8 ranks
constexpr std::size_t kSlotsBytes = std::size_t{256} << 20;  // all ranks together, from 8 ranks on
constexpr std::size_t kAlignment = 256;
// After an abort, kAbortTime is the time for the streams to finish, and kGrace the time for the other ranks to learn of
// the abort from Maniple. Ranks that have not are dead or hang; their work on the device must be ended for them, or it
// would hold memory and the device.
constexpr auto kAbortTime = std::chrono::milliseconds(100);
constexpr auto kGrace = std::chrono::milliseconds(300);

std::string numbered(const char* key, int rank) { return key + std::to_string(rank); }

/// Publishes this rank's value in the store and returns the values of all ranks.
std::vector<std::string> exchange(const DeviceContext& context, const char* key, const std::string& value) {
  context.store->set(numbered(key, context.rank), value);
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.size(); ++rank) keys.push_back(numbered(key, rank));
  for (;;) {  // in short turns, so that the death of a rank ends the wait
    if (context.abort != nullptr && context.abort->aborted()) throw Aborted("the group failed while it was set up");
    try {
      return context.store->multi_get(
          keys, Deadline::sooner(context.deadline, Deadline::after(std::chrono::milliseconds(500))));
    } catch (const Timeout&) {
      if (context.deadline.expired()) throw;
    }
  }
}

/// Why this rank's device cannot be used together with the other ranks' devices; empty if it can.
std::string obstacle(int device, const std::vector<std::string>& ids) {
  const auto attribute = [device](CUdevice_attribute which) {
    int value = 0;
    return driver().device_attribute(&value, which, device) == CUDA_SUCCESS && value != 0;
  };
  if (!attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) ||
      !attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    return "its GPU cannot share memory by descriptor";
  }
#if CUDART_VERSION >= 12000
  if (!attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)) {
    return "its GPU has no stream memory operations of 64 bits";
  }
#endif
  int visible = 0;
  check(::cudaGetDeviceCount(&visible), "cudaGetDeviceCount");
  for (const std::string& id : ids) {
    int found = -1;
    for (int i = 0; i < visible; ++i) {
      if (device_id(i) == id) found = i;
    }
    if (found < 0) return "it does not see the GPU of another rank (CUDA_VISIBLE_DEVICES)";
    int reachable = 1;
    if (found != device) check(::cudaDeviceCanAccessPeer(&reachable, device, found), "cudaDeviceCanAccessPeer");
    if (reachable == 0) return "its GPU has no peer access to another rank's GPU";
  }
  return {};
}

}  // namespace

CudaGroup::CudaGroup(const DeviceContext& context)
    : rank_(context.rank), ranks_(context.size()), device_(context.device), descriptors_(context.descriptors) {
  if (ranks_ > kMostRanks) {
    throw Unsupported("cuda serves groups of up to " + std::to_string(kMostRanks) + " ranks, this one has " +
                      std::to_string(ranks_) + "; use the backend nccl or native");
  }
  for (const int node : context.nodes) {
    if (node != context.nodes.front()) {
      throw Unsupported(
          "cuda serves groups of one host, this one has ranks on several; use the backend nccl or native");
    }
  }
  const OnDevice on(device_);
  const std::vector<std::string> ids = exchange(context, "device/", device_id(device_));
  std::string reason;
  try {
    reason = obstacle(device_, ids);
  } catch (const Error& error) {
    reason = error.what();
  }
  bool side_by_side = true;
  for (const std::string& answer : exchange(context, "mps/", under_mps() ? "yes" : "no")) {
    side_by_side = side_by_side && answer == "yes";
  }
  const std::vector<std::string> reasons = exchange(context, "obstacle/", reason.empty() ? "none" : reason);
  for (int rank = 0; rank < ranks_; ++rank) {
    if (reasons[rank] != "none") {
      throw Unsupported("cuda cannot serve this group, says rank " + std::to_string(context.global_ranks[rank]) + ": " +
                        reasons[rank] + "; use the backend nccl or native");
    }
    if (rank != rank_) peers_ |= std::uint64_t{1} << rank;
    if (ids[rank] != ids.front()) one_device_ = false;
  }
  in_kernel_ = side_by_side || std::set<std::string>(ids.begin(), ids.end()).size() == ids.size();
  load_kernels();
  check(::cudaEventCreateWithFlags(&own_event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check(::cudaEventCreateWithFlags(&capture_event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  if (ranks_ == 1) return;
  slot_bytes_ = std::min(kSlotBytes, kSlotsBytes / static_cast<std::size_t>(ranks_)) / kAlignment * kAlignment;
  const std::vector<std::size_t> sizes(ranks_, kFlagsBytes + slot_bytes_);
  arena_ = std::make_unique<SharedMemory>(*context.descriptors, rank_, device_, sizes, "cuda/arena", context.deadline);
  control_ = std::make_unique<ControlPage>(*context.descriptors, rank_, ranks_, context.deadline);
}

// Memory that a kernel still uses must not be unmapped: that would kill this process, and under MPS other processes.
bool CudaGroup::finish() noexcept {
  const Relaxed relaxed;
  const Deadline limit = Deadline::after(std::chrono::seconds(5));
  while (!is_idle() && !limit.expired()) std::this_thread::yield();
  {
    const MutexLock lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (releaser_.joinable()) releaser_.join();
  *in_use_ = !is_idle();
  return !*in_use_;
}

CudaGroup::~CudaGroup() {
  if (!leaving_) finish();
  if (*in_use_) {
    static_cast<void>(arena_.release());
    static_cast<void>(control_.release());
    return;
  }
  const Relaxed relaxed;
  const OnDevice on(device_, std::nothrow);
  ::cudaEventDestroy(own_event_);
  ::cudaEventDestroy(capture_event_);
}

void CudaGroup::enqueue_messages(std::span<const DeviceMessage>, void*) {
  throw Unsupported("cuda sends no messages; they go through host memory");
}

RegisteredMemory CudaGroup::allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) {
  if (aborted_) throw Aborted("the group was aborted");
  auto memory = std::make_shared<SharedMemory>(*descriptors_, rank_, device_, sizes, "cuda/" + std::to_string(number),
                                               deadline, in_use_);
  std::erase_if(registrations_, [](const Registration& old) { return old.memory.expired(); });
  std::byte* const data = memory->of(rank_);
  registrations_.push_back({number, data, sizes[rank_], memory});
  return RegisteredMemory(data, sizes[rank_], memory);
}

CudaGroup::Located CudaGroup::locate(const void* data, std::size_t bytes) {
  const auto* const start = static_cast<const std::byte*>(data);
  for (const Registration& known : registrations_) {
    if (known.data == nullptr || start < known.data || start + bytes > known.data + known.size) continue;
    if (auto memory = known.memory.lock()) {
      return {std::move(memory), known.number, static_cast<std::size_t>(start - known.data)};
    }
  }
  return {};
}

/// Orders later work in the stream after this group's last operation, on whichever stream that was enqueued. Also
/// orders operations within one graph. The caller must order a graph after work that was enqueued before it.
void CudaGroup::order_after_last(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check(::cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
  capturing_ = status == cudaStreamCaptureStatusActive;
  if (capturing_) {
    if (capture == capture_ && stream != capture_stream_) {
      check(::cudaStreamWaitEvent(stream, capture_event_, 0), "cudaStreamWaitEvent");
    }
    capture_ = capture;
  } else if (last_event_ != nullptr && stream != last_stream_) {
    check(::cudaStreamWaitEvent(stream, last_event_, 0), "cudaStreamWaitEvent");
  }
}

void CudaGroup::remember_last(cudaStream_t stream, cudaEvent_t end) {
  if (capturing_) {
    check(::cudaEventRecord(capture_event_, stream), "cudaEventRecord");
    if (end != nullptr) check(::cudaEventRecord(end, stream), "cudaEventRecord");
    capture_stream_ = stream;
    return;
  }
  const cudaEvent_t event = end != nullptr ? end : own_event_;
  check(::cudaEventRecord(event, stream), "cudaEventRecord");
  last_event_ = event;
  last_stream_ = stream;
}

bool CudaGroup::is_idle() noexcept {
  const cudaEvent_t last = last_event_;
  if (last == nullptr) return true;
  const OnDevice on(device_, std::nothrow);
  const cudaError_t code = ::cudaEventQuery(last);
  if (code != cudaSuccess) ::cudaGetLastError();
  return code != cudaErrorNotReady;
}

DeviceFault CudaGroup::fault() noexcept {
  if (aborted_ || ranks_ == 1) return {};
  if (control_->stopped() == kAbortedByAnother) {
    return {.kind = DeviceFault::Kind::failed,
            .reason = "another rank has aborted the group, or left it with operations under way",
            .seq = 0};
  }
  bool found = false;
  const std::uint64_t seq = control_->find_mismatch(found);
  if (found) return {.kind = DeviceFault::Kind::mismatch, .reason = {}, .seq = seq};
  const Relaxed relaxed;
  const OnDevice on(device_, std::nothrow);
  const cudaEvent_t last = last_event_;
  const cudaError_t code = last != nullptr ? ::cudaEventQuery(last) : cudaSuccess;
  if (code == cudaSuccess || code == cudaErrorNotReady) {
    if (code != cudaSuccess) ::cudaGetLastError();
    return {};
  }
  return {.kind = DeviceFault::Kind::failed, .reason = ::cudaGetErrorString(code), .seq = 0};
}

DevicePlugin::Waits CudaGroup::waits() noexcept {
  if (!in_kernel_ || ranks_ == 1) return Waits::unknown;
  for (const std::uint8_t& awaited : control_->record(rank_).awaited) {
    if (__atomic_load_n(&awaited, __ATOMIC_ACQUIRE) != 0) return Waits::yes;
  }
  return Waits::no;
}

std::vector<LateRank> CudaGroup::late_ranks(std::uint64_t seq) noexcept try {
  std::vector<LateRank> late;
  if (ranks_ == 1) return late;
  bool led = false;
  for (const int rank : control_->not_called(seq, led)) late.push_back({rank, false});
  if (!late.empty()) return late;
  // All ranks have made the call, so find the late streams. If kernels wait, they record the peers they wait for; if
  // streams wait, their flags show it.
  const auto is_set = [](const auto& flag) { return __atomic_load_n(&flag, __ATOMIC_ACQUIRE) != 0; };
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    const Flags& own = *control_->flags(rank_);
    bool came = true;
    if (in_kernel_) {
      came = !is_set(control_->record(rank_).awaited[rank]);
    } else if (led) {
      came = rank == 0 || is_set(control_->flags(0)->lead_ready[rank]);
    } else {
      came = is_set(own.ready[rank]) || is_set(own.done[rank]);
    }
    if (!came) late.push_back({rank, true});
  }
  if (late.empty() && led && rank_ != 0) late.push_back({0, true});
  return late;
} catch (const std::exception&) {
  return {};
}

void CudaGroup::abort() noexcept {
  if (aborted_.exchange(true) || ranks_ == 1) return;
  try {
    releaser_ = std::thread([this] { release(); });
    MutexLock lock(mutex_);
    changed_.wait_for(lock, kAbortTime, [this]() MANIPLE_REQUIRES(mutex_) { return released_; });
  } catch (const std::exception&) {  // no thread could be started: do the part that does not wait
    control_->stop(rank_, kAborted);
    set_flags();
  }
}

/// Ends all waits of this rank and, after kGrace, the waits of ranks that have not ended theirs.
void CudaGroup::release() {
  control_->stop(rank_, kAborted);  // first of all: kernels that start from now on must do nothing
  const Deadline grace = Deadline::after(kGrace);
  const Relaxed relaxed;
  const OnDevice on(device_, std::nothrow);
  bool told = false;
  MutexLock lock(mutex_);
  while (!(leaving_ && told)) {
    lock.unlock();
    // Several times before calling CUDA, whose calls may wait for a thread that enqueues into a full stream.
    for (int turn = 0; turn < 20 && !in_kernel_; ++turn) {
      set_flags();
      std::this_thread::yield();
    }
    if (!told && grace.expired()) {
      told = true;
      for (int rank = 0; rank < ranks_; ++rank) control_->stop(rank, kAbortedByAnother);
    }
    const bool idle = is_idle();
    lock.lock();
    if (idle && !released_) {
      released_ = true;
      changed_.notify_all();
    }
    const auto pause = idle && told ? std::chrono::microseconds(20000) : std::chrono::microseconds(200);
    changed_.wait_for(lock, pause, [this, told] { return leaving_ && told; });
  }
}

/// Sets all flags that this process's streams wait for. Must be repeated: streams of ranks that do not lead clear their
/// flags, so do kernels that began before the abort, and a graph that is replayed later waits again.
void CudaGroup::set_flags() noexcept {
  Flags& own = *control_->flags(rank_);
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto is_peer = static_cast<std::uint8_t>(peers_ >> rank & 1);
    __atomic_store_n(&own.ready[rank], is_peer, __ATOMIC_SEQ_CST);
    __atomic_store_n(&own.done[rank], is_peer, __ATOMIC_SEQ_CST);
    __atomic_store_n(&own.lead_ready[rank], std::uint64_t{1}, __ATOMIC_SEQ_CST);
  }
  __atomic_store_n(&own.lead_done, std::uint64_t{1}, __ATOMIC_SEQ_CST);
}

}  // namespace maniple::cuda_plugin
