// The operations of one group whose ranks share a host, on device memory that all of them can map. See kernels.h for
// the synchronisation between ranks, docs/backends.md for the user's view.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/base/mutex.h"
#include "plugins/cuda/control_page.h"
#include "plugins/cuda/driver.h"
#include "plugins/cuda/kernels.h"
#include "plugins/cuda/plan.h"
#include "plugins/cuda/shared_memory.h"

namespace maniple::cuda_plugin {

class CudaGroup final : public DevicePlugin {
 public:
  explicit CudaGroup(const DeviceContext& context);
  ~CudaGroup() override;

  std::string_view name() const noexcept override { return "cuda"; }
  bool can(const Operation& operation) const noexcept override;
  bool enqueue(const Operation& operation, void* end) override;
  // Operations start as soon as they are enqueued: batching would gain nothing.
  void begin_batch() override {}
  void end_batch(void*) override {}
  bool has_messages() const noexcept override { return false; }
  void enqueue_messages(std::span<const DeviceMessage> messages, void* stream) override;
  bool can_capture() const noexcept override { return true; }
  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) override;
  DeviceFault fault() noexcept override;
  Waits waits() noexcept override;
  std::vector<LateRank> late_ranks(std::uint64_t seq) noexcept override;
  void abort() noexcept override;
  bool finish() noexcept override;

 private:
  /// Memory that operations recognise by its address. The holder of the handle owns it.
  struct Registration {
    std::uint64_t number = 0;
    std::byte* data = nullptr;
    std::size_t size = 0;
    std::weak_ptr<SharedMemory> memory;
  };
  /// The registered memory of a call; `memory` is null for ordinary memory.
  struct Located {
    std::shared_ptr<SharedMemory> memory;
    std::uint64_t number = 0;
    std::size_t offset = 0;
  };
  struct Call;

  /// The flags at the address that streams and kernels use.
  Flags* flags(int rank) const noexcept {
    return in_kernel_ ? reinterpret_cast<Flags*>(arena_->of(rank)) : control_->flags_on_device(rank);
  }
  DeviceState* state(int rank) const noexcept {
    return reinterpret_cast<DeviceState*>(arena_->of(rank) + kStateOffset);
  }
  std::byte* slot(int rank) const noexcept { return arena_->of(rank) + kFlagsBytes; }
  Located locate(const void* data, std::size_t bytes);
  Signal make_signal(std::uint64_t active) const noexcept;

  void run_alone(const Call& call);
  void run_lead(const Call& call, std::byte* own, std::size_t count);
  void follow(const Call& call);
  void run_lead_staged(const Call& call);
  bool leads_on_slots(const Call& call) const noexcept;
  void run_rounds(const Call& call);
  void run_round(const Call& call, const std::vector<std::size_t>& rounds, std::size_t round, std::size_t chunk);
  void reduce(const Call& call, ReduceArguments& work);
  void set_sources(const Call& call, std::uint64_t active, WorkArguments& work) const noexcept;
  void wait_for(const std::uint8_t* bytes, std::uint64_t active, bool all_at_once, cudaStream_t stream);

  void order_after_last(cudaStream_t stream);
  void remember_last(cudaStream_t stream, cudaEvent_t end);
  void release();
  void set_flags() noexcept;
  bool is_idle() noexcept;

  int rank_ = 0;
  int ranks_ = 1;
  int device_ = 0;
  std::uint64_t peers_ = 0;  // a bit for each rank except this one
  bool one_device_ = true;   // all ranks use the same device
  bool in_kernel_ = false;   // the ranks' kernels run concurrently, so kernels wait for each other, not streams
  std::size_t slot_bytes_ = 0;
  DescriptorExchange* descriptors_ = nullptr;
  // Null in a group of one rank. The arena is destroyed first: it waits for kernels, which read the page.
  std::unique_ptr<ControlPage> control_;
  std::unique_ptr<SharedMemory> arena_;
  std::vector<Registration> registrations_;
  const std::shared_ptr<std::atomic<bool>> in_use_ = std::make_shared<std::atomic<bool>>(false);  // see SharedMemory

  cudaEvent_t own_event_ = nullptr;
  std::atomic<cudaEvent_t> last_event_{
      nullptr};  // after the last operation outside graphs: own_event_ or the caller's event
  cudaStream_t last_stream_ = nullptr;
  cudaEvent_t capture_event_ = nullptr;  // after the last captured operation
  cudaStream_t capture_stream_ = nullptr;
  unsigned long long capture_ = 0;
  bool capturing_ = false;

  std::atomic<bool> aborted_{false};
  Mutex mutex_;
  CondVar changed_;
  std::atomic<bool> leaving_{false};
  bool released_ MANIPLE_GUARDED_BY(mutex_) = false;  // all enqueued operations are complete
  std::thread releaser_;
};

}  // namespace maniple::cuda_plugin
