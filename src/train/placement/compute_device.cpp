#include <maniple/train/placement.h>

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "train/data_parallel/replica_threads.h"

namespace maniple {
namespace {

torch::Device usable(torch::Device device) {
  if (device.is_cpu()) {
    MANIPLE_REQUIRE(!device.has_index() || device.index() == 0,
                    "ComputeDevice: {} is not there, the CPU is one device; cpu_slot() makes several of it",
                    device.str());
    return torch::kCPU;
  }
  if (!device.is_cuda()) {
    throw Unsupported(format_text("ComputeDevice: {}; a module can be placed on cpu and cuda", device.str()));
  }
  MANIPLE_REQUIRE(torch::cuda::is_available(), "ComputeDevice: {}, but this LibTorch finds no CUDA device",
                  device.str());
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  const auto count = static_cast<int>(torch::cuda::device_count());
  MANIPLE_REQUIRE(device.index() < count, "ComputeDevice: {}, but this process sees {} CUDA devices", device.str(),
                  count);
  return device;
}

cpu_set_t allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof(set), &set);
  return set;
}

cpu_set_t checked_cores(const std::vector<int>& cores) {
  const cpu_set_t allowed = allowed_cores();
  cpu_set_t chosen;
  CPU_ZERO(&chosen);
  for (const int core : cores) {
    MANIPLE_REQUIRE(core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &allowed),
                    "cpu_slot: this process may not use core {}; `taskset -pc PID` shows those that it may use", core);
    CPU_SET(core, &chosen);
  }
  return chosen;
}

/// Autograd runs nodes in descending order of sequence numbers, and each thread has its own counter. Advancing the
/// counter keeps the order of nodes, and so the order of additions, the same as in one thread.
void count_at_least(std::uint64_t number) {
  while (at::sequence_number::peek() < number) at::sequence_number::get_and_increment();
}

}  // namespace

namespace detail {

class CpuSlot {
 public:
  explicit CpuSlot(const CpuSlotOptions& options)
      : threads_({torch::kCPU}, options.threads > 0 ? options.threads : static_cast<int>(options.cores.size())) {
    static std::atomic<int> slots{0};
    number_ = slots++;
    const bool bind = !options.cores.empty();
    const cpu_set_t cores = checked_cores(options.cores);
    call([&] {
      ::pthread_setname_np(::pthread_self(), format_text("cpu-slot-{}", number_).c_str());
      // Before the thread's first operation: the intra-op threads that it starts inherit the cores.
      if (bind) ::sched_setaffinity(0, sizeof(cores), &cores);
    });
  }

  static ComputeDevice make(const CpuSlotOptions& options) {
    ComputeDevice device(torch::kCPU);
    device.slot_ = std::make_shared<CpuSlot>(options);
    return device;
  }

  int number() const noexcept { return number_; }

  void call(const std::function<void()>& function) {
    if (threads_.inside()) return function();  // a module of this slot inside another
    std::uint64_t nodes = at::sequence_number::peek();
    const auto thrown = threads_.run(1, [&](std::size_t) {
      count_at_least(nodes);
      function();
      nodes = at::sequence_number::peek();
    });
    if (thrown.front()) std::rethrow_exception(thrown.front());
    count_at_least(nodes);
  }

 private:
  ReplicaThreads threads_;
  int number_ = 0;
};

PlacedBase::PlacedBase(std::shared_ptr<torch::nn::Module> module, ComputeDevice device)
    : torch::nn::Module("Placed"), device_(std::move(device)), placed_(std::move(module)) {
  MANIPLE_REQUIRE(placed_ != nullptr, "place: the module is null");
  placed_->to(device_.device());
  register_module("module", placed_);
}

bool PlacedBase::is_training() const noexcept { return placed_->is_training(); }

std::vector<torch::Tensor> PlacedBase::moved(std::vector<torch::Tensor> tensors) const {
  for (torch::Tensor& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.to(device_.device(), /*non_blocking=*/true);
  }
  return tensors;
}

void PlacedBase::to(torch::Device device, bool) {
  const torch::Device own = device_.device();
  MANIPLE_REQUIRE(device.type() == own.type() && (!device.has_index() || device.index() == own.index() || own.is_cpu()),
                  "Placed: to({}) would move a module that was placed on {}; move the other modules one by one, or "
                  "place it anew",
                  device.str(), device_.str());
}
void PlacedBase::to(torch::Dtype dtype, bool non_blocking) { placed_->to(dtype, non_blocking); }
void PlacedBase::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

}  // namespace detail

ComputeDevice::ComputeDevice(torch::Device device) : device_(usable(device)) {}

std::string ComputeDevice::str() const { return slot_ ? format_text("cpu slot {}", slot_->number()) : device_.str(); }

void ComputeDevice::run(const std::function<void()>& call) const {
  if (slot_) return slot_->call(call);
  const c10::DeviceGuard current(device_);
  call();
}

ComputeDevice cpu_slot(const CpuSlotOptions& options) {
  MANIPLE_REQUIRE(options.threads >= 0, "cpu_slot: {} threads; expected 0 or more", options.threads);
  return detail::CpuSlot::make(options);
}

std::vector<ComputeDevice> my_devices() {
  // Kept until the process ends: at exit, threads of the slots must not be joined while static objects are destroyed.
  static const auto* const devices = [] {
    constexpr std::int64_t kMax = 1024;
    const int given = static_cast<int>(environment_integer("MANIPLE_DEVICES_PER_PROCESS", 0, kMax).value_or(0));
    auto* const list = new std::vector<ComputeDevice>();
    if (torch::cuda::is_available()) {
      const auto count = static_cast<int>(torch::cuda::device_count());
      MANIPLE_REQUIRE(
          given <= count,
          "my_devices: the launcher gave this process {} devices (--devices-per-process), but LibTorch sees "
          "{} GPUs; give each process at most that many",
          given, count);
      for (int i = 0; i < count; ++i) {
        list->emplace_back(torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(i)));
      }
    } else if (given <= 1) {
      list->emplace_back(torch::kCPU);
    } else {
      const int threads = std::max(1, at::get_num_threads() / given);
      for (int i = 0; i < given; ++i) list->push_back(cpu_slot({.threads = threads}));
    }
    return list;
  }();
  return *devices;
}

}  // namespace maniple
