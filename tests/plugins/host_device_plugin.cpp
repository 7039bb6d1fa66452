// A device plugin whose device is this host, in the place of "cuda": what Maniple does around streams
// (comm/backend/device/) is tested by it where there is no GPU. A stream is a thread that runs what it is given in
// order; device memory is any memory. The engine can sum up to 1024 int32 over the ranks of one host, and
// barriers; all else goes through host memory.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "comm/backend/device/device_plugin.h"

namespace maniple {
namespace {

void pause() {
  ::usleep(20);  // sleep: words are set by the host, and by other processes, without a wake-up
}

/// How much a stream was given, and has done.
struct Progress {
  std::atomic<std::uint64_t> given{0};
  std::atomic<std::uint64_t> done{0};
};

class AllStreams {
 public:
  std::shared_ptr<Progress> add() {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_shared<Progress>());
    return streams_.back();
  }
  /// Waits until they have done what they hold now, as freeing GPU memory does.
  void synchronize() {
    std::vector<std::pair<std::shared_ptr<Progress>, std::uint64_t>> awaited;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& stream : streams_) awaited.emplace_back(stream, stream->given.load());
    }
    for (const auto& [stream, number] : awaited) {
      while (stream->done < number) pause();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Progress>> streams_;
};

AllStreams& all_streams() {
  static auto* const one = new AllStreams;  // memory may be freed after static objects
  return *one;
}

/// Does what it is given, in order.
class Queue {
 public:
  Queue() : progress_(all_streams().add()), thread_([this] { run(); }) {}
  ~Queue() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      if (task) ++progress_->given;
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task) return;
      task();
      ++progress_->done;
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::shared_ptr<Progress> progress_;
  std::thread thread_;
};

/// With HOST_DEVICE_ONE_QUEUE all streams share a queue, as many streams of a GPU do.
class Stream {
 public:
  explicit Stream(int device) : device_(device) {
    static std::mutex mutex;
    static std::weak_ptr<Queue> shared;
    const std::lock_guard lock(mutex);
    const bool one = std::getenv("HOST_DEVICE_ONE_QUEUE") != nullptr;
    queue_ = one ? shared.lock() : nullptr;
    if (!queue_) queue_ = std::make_shared<Queue>();
    if (one) shared = queue_;
  }
  int device() const { return device_; }
  void push(std::function<void()> task) { queue_->push(std::move(task)); }

 private:
  int device_;
  std::shared_ptr<Queue> queue_;
};

/// Counts how often it was recorded, and how many of these records its streams have reached.
struct Event {
  std::atomic<std::uint64_t> recorded{0};
  std::atomic<std::uint64_t> reached{0};
};

/// A handle is a pointer to one. Streams may hold the event longer.
struct EventHandle {
  int device = 0;
  std::shared_ptr<Event> event = std::make_shared<Event>();
};

/// HOST_DEVICE_COUNT of them; 1 by default.
int count_devices() {
  const char* const text = std::getenv("HOST_DEVICE_COUNT");
  return text != nullptr ? std::atoi(text) : 1;
}

Stream& default_stream_of(int device) {
  static std::mutex mutex;
  static auto* const streams = new std::map<int, std::unique_ptr<Stream>>;
  const std::lock_guard lock(mutex);
  auto& stream = (*streams)[device];
  if (!stream) stream = std::make_unique<Stream>(device);
  return *stream;
}

void require_same_device(int device, int named) {
  if (device == named) return;
  throw SystemError("a handle of device " + std::to_string(device) + " was passed for device " + std::to_string(named),
                    0);
}

Stream& stream_of(DeviceStream stream) {
  if (stream.device < 0 || stream.device >= count_devices()) throw SystemError("no such device", 0);
  if (stream.handle == nullptr) return default_stream_of(stream.device);
  auto& found = *static_cast<Stream*>(stream.handle);
  require_same_device(found.device(), stream.device);
  return found;
}

std::shared_ptr<Event> event_of(DeviceEvent event) {
  const auto& found = *static_cast<EventHandle*>(event.handle);
  require_same_device(found.device, event.device);
  return found.event;
}

class HostRuntime final : public DeviceRuntime {
 public:
  int device_count() noexcept override { return count_devices(); }
  std::string device_id(int device) override { return "HOST-" + std::to_string(device); }
  std::string describe(int) override { return "this host, in the place of a GPU"; }
  DeviceStream make_stream(int device) override { return {device, new Stream(device)}; }
  void free_stream(DeviceStream stream) noexcept override { delete static_cast<Stream*>(stream.handle); }
  bool is_capturing(DeviceStream stream) override {
    stream_of(stream);  // checks it
    return false;
  }
  DeviceEvent make_event(int device) override { return {device, new EventHandle{device}}; }
  void free_event(DeviceEvent event) noexcept override { delete static_cast<EventHandle*>(event.handle); }
  void record(DeviceEvent event, DeviceStream stream) override {
    require_same_device(event.device, stream.device);
    const std::uint64_t number = ++event_of(event)->recorded;
    stream_of(stream).push([event = event_of(event), number] { event->reached = number; });
  }
  void wait(DeviceStream stream, DeviceEvent event) override {
    stream_of(stream).push([event = event_of(event), number = event_of(event)->recorded.load()] {
      while (event->reached < number) pause();
    });
  }
  bool reached(DeviceEvent event) override { return event_of(event)->reached >= event_of(event)->recorded; }
  std::byte* make_memory(int device, std::size_t bytes) override { return make_pinned(device, bytes); }
  void free_memory(int device, std::byte* memory) noexcept override {
    all_streams().synchronize();
    free_pinned(device, memory);
  }
  std::byte* make_pinned(int, std::size_t bytes) override {
    return static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  }
  void free_pinned(int, std::byte* memory) noexcept override { std::free(memory); }
  void copy(void* to, const void* from, std::size_t bytes, DeviceStream stream) override {
    stream_of(stream).push([=] { std::memcpy(to, from, bytes); });
  }
  void wait_for_bits(DeviceStream stream, const std::uint32_t* word, std::uint32_t bits) override {
    stream_of(stream).push([=] {
      while ((__atomic_load_n(word, __ATOMIC_ACQUIRE) & bits) == 0) pause();
    });
  }
};

constexpr int kMostRanks = 16;
constexpr std::size_t kMostElements = 1024;

/// What the ranks of a group share: of each, the number of the last operation that it called, whose turn its stream has
/// reached, and that it has finished.
struct Board {
  std::atomic<std::uint64_t> called[kMostRanks];
  std::atomic<std::uint64_t> arrived[kMostRanks];
  std::atomic<std::uint64_t> finished[kMostRanks];
  std::atomic<std::uint64_t> count[kMostRanks];
  std::atomic<std::uint64_t> mismatch;  // seq of the operation in which counts differ
  std::int32_t values[kMostRanks][kMostElements];
};

class HostGroup final : public DevicePlugin {
 public:
  explicit HostGroup(const DeviceContext& context)
      : rank_(context.rank), ranks_(context.size()), compare_(context.compare) {
    int descriptor = rank_ == 0 ? ::memfd_create("host-device", MFD_CLOEXEC) : -1;
    if (rank_ == 0 && ::ftruncate(descriptor, sizeof(Board)) != 0) throw SystemError("ftruncate failed", 0);
    const int theirs = context.descriptors->share("board", 0, descriptor, context.deadline);
    if (rank_ != 0) descriptor = theirs;
    void* const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    if (memory == MAP_FAILED) throw SystemError("mmap failed", 0);
    board_ = static_cast<Board*>(memory);
  }
  ~HostGroup() override { ::munmap(board_, sizeof(Board)); }
  bool finish() noexcept override {
    while (running_ != 0) pause();
    return true;
  }

  std::string_view name() const noexcept override { return "host device"; }
  bool can(const Operation& op) const noexcept override {
    return op.op == Op::barrier || (op.op == Op::all_reduce && op.dtype == DType::int32 &&
                                    op.reduce.kind() == ReduceOp::sum && op.count <= kMostElements);
  }
  bool enqueue(const Operation& op, void*) override {
    if (stop_) throw Aborted("the group was aborted");
    const std::uint64_t number = ++calls_;
    {
      const std::lock_guard lock(mutex_);
      numbers_[op.seq] = number;
    }
    board_->called[rank_] = number;
    ++running_;
    stream_of({op.device.index, op.stream}).push([this, op, number] {
      run(op, number);
      --running_;
    });
    return false;
  }
  void begin_batch() override {}
  void end_batch(void*) override {}
  bool has_messages() const noexcept override { return false; }
  void enqueue_messages(std::span<const DeviceMessage>, void*) override {}
  bool can_capture() const noexcept override { return false; }
  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t, Deadline) override {
    const std::size_t bytes = sizes[static_cast<std::size_t>(rank_)];
    const std::shared_ptr<void> memory(std::calloc(bytes + 1, 1), [](void* data) {
      all_streams().synchronize();
      std::free(data);
    });
    return RegisteredMemory(static_cast<std::byte*>(memory.get()), bytes, memory);
  }
  DeviceFault fault() noexcept override {
    const std::uint64_t seq = stop_ ? 0 : board_->mismatch.load();
    return {.kind = seq != 0 ? DeviceFault::Kind::mismatch : DeviceFault::Kind::none, .reason = {}, .seq = seq};
  }
  Waits waits() noexcept override { return waiting_ ? Waits::yes : Waits::no; }
  std::vector<LateRank> late_ranks(std::uint64_t seq) noexcept override {
    if (!compare_) return {};  // as NCCL does
    const std::lock_guard lock(mutex_);
    std::vector<LateRank> late;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (board_->arrived[rank] < numbers_[seq]) late.push_back({rank, board_->called[rank] >= numbers_[seq]});
    }
    return late;
  }
  void abort() noexcept override { stop_ = true; }

 private:
  /// Waits until all ranks have come to a number; false when the group was aborted first.
  bool await(const std::atomic<std::uint64_t>* numbers, std::uint64_t number) {
    for (int rank = 0; rank < ranks_ && !stop_; ++rank) {
      for (; numbers[rank] < number && !stop_; pause()) waiting_ = true;
    }
    waiting_ = false;
    return !stop_;
  }
  void run(const Operation& op, std::uint64_t number) {
    const std::size_t count = op.op == Op::barrier ? 0 : op.count;
    if (count != 0) std::memcpy(board_->values[rank_], op.in, count * sizeof(std::int32_t));
    board_->count[rank_] = count;
    board_->arrived[rank_] = number;
    if (!await(board_->arrived, number)) return;
    bool same = true;
    for (int rank = 0; rank < ranks_; ++rank) same = same && board_->count[rank] == count;
    if (!same && compare_) board_->mismatch = op.seq;
    for (; !same && !compare_ && !stop_; pause()) waiting_ = true;  // the same
    auto* const out = reinterpret_cast<std::int32_t*>(op.out);
    for (std::size_t i = 0; same && i < count; ++i) {
      std::int32_t sum = 0;
      for (int rank = 0; rank < ranks_; ++rank) sum += board_->values[rank][i];
      out[i] = sum;
    }
    board_->finished[rank_] = number;
    await(board_->finished, number);  // nobody reads this rank's values any more
  }

  int rank_;
  int ranks_;
  bool compare_;
  Board* board_ = nullptr;
  std::uint64_t calls_ = 0;
  std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> numbers_;  // of operations, by their seq
  std::atomic<int> running_{0};
  std::atomic<bool> waiting_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace
}  // namespace maniple

extern "C" __attribute__((visibility("default"))) const maniple::DevicePluginEntry* maniple_device_plugin_entry() {
  using namespace maniple;
  static const DevicePluginEntry entry = {.abi = kDevicePluginAbi,
                                          .operation = sizeof(Operation),
                                          .version = "of this host",
                                          .missing = [] { return std::string(); },
                                          .runtime = []() -> DeviceRuntime* {
                                            static HostRuntime runtime;
                                            return &runtime;
                                          },
                                          .make = [](const DeviceContext& context) -> std::unique_ptr<DevicePlugin> {
                                            return std::make_unique<HostGroup>(context);
                                          }};
  return &entry;
}
