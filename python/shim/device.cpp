#include "device.h"

#include "errors.h"

#ifdef MANIPLE_TORCH_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace maniple_torch {

#ifdef MANIPLE_TORCH_CUDA

namespace {

using c10::cuda::CUDAStream;

c10::DeviceIndex index_of(int device) { return static_cast<c10::DeviceIndex>(device); }

/// A stream for an operation's copies and for callbacks of futures. Takes the next stream of PyTorch's pool each time,
/// because work there waits for one operation and must not hold up the next.
CUDAStream side_stream(at::Device device) { return c10::cuda::getStreamFromPool(true, device.index()); }

class GpuWork : public c10d::Work {
 public:
  GpuWork(int rank, c10d::OpType type, const char* title, at::Device device, const Operation& operation)
      : Work(rank, type, title, profiled_inputs(operation)), device_(device), outputs_(operation.outputs) {}
  ~GpuWork() override { maniple_work_free(handle_); }

  /// Call once, before the work is returned to the caller.
  void start(maniple_group* group, Operation operation) {
    const maniple_call call{operation.timeout_s, nullptr, nullptr,
                            c10::cuda::getCurrentCUDAStream(device_.index()).stream()};
    check(operation.run(group, &call, &handle_));
    std::exception_ptr error;  // from the copies; the operation is in progress even then
    try {
      if (operation.finish) copy_results(operation);
    } catch (...) {
      error = std::current_exception();
    }
    struct Kept {
      c10::intrusive_ptr<GpuWork> self;
      Operation operation;  // keeps the tensors until the GPU is done with them
    };
    maniple_work_on_done(
        handle_,
        [](void* context, maniple_error* failure) {
          const std::unique_ptr<Kept> kept(static_cast<Kept*>(context));
          kept->self->finish(exception_of(failure));
        },
        new Kept{c10::intrusive_ptr<GpuWork>::unsafe_reclaim_from_nonowning(this), std::move(operation)});
    if (error) std::rethrow_exception(error);
  }

  bool isCompleted() override { return maniple_work_done(handle_) != 0 && (!end_ || end_->query()); }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (timeout != kNoTimeout) wait_on_host(timeout);
    order(c10::cuda::getCurrentCUDAStream(device_.index()));
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  int sourceRank() const override { return maniple_work_source(handle_); }
  std::vector<at::Tensor> result() override { return outputs_; }

  /// The future is complete from the start, with events of a stream that follows the operation. Users of its value thus
  /// wait for the operation on the GPU.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard lock(future_mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<at::Device>{device_});
    try {
      const CUDAStream stream = side_stream(device_);
      order(stream);
      const c10::cuda::CUDAStreamGuard guard(stream);
      future_->markCompleted(c10::IValue(outputs_));
    } catch (...) {
      future_->setError(std::current_exception());
    }
    return future_;
  }

 private:
  void order(const CUDAStream& stream) {
    check(maniple_work_order(handle_, stream.stream()));
    if (end_) end_->block(stream.unwrap());
  }

  void copy_results(const Operation& operation) {
    const CUDAStream stream = side_stream(device_);
    check(maniple_work_order(handle_, stream.stream()));
    const c10::cuda::CUDAStreamGuard guard(stream);
    operation.finish();
    for (const auto* list : {&operation.tensors, &operation.outputs}) {
      for (const at::Tensor& tensor : *list) {
        if (tensor.defined()) tensor.record_stream(stream.unwrap());
      }
    }
    end_ = std::make_unique<c10::Event>(at::kCUDA);
    end_->record(stream.unwrap());
  }

  void wait_on_host(std::chrono::milliseconds timeout) {
    constexpr std::chrono::milliseconds kLook{100};  // interval for checking signals
    for (auto rest = timeout; rest.count() > 0; rest -= kLook) {
      int done = 0;
      check(maniple_work_wait(handle_, std::chrono::duration<double>(std::min(rest, kLook)).count(), &done));
      if (done != 0) return;
      bool interrupted = false;
      if (interrupted_by_signal(&interrupted) != 0) throw_python_error();
    }
    throw Failure(MANIPLE_TIMEOUT, "wait: the operation is not done after " + std::to_string(timeout.count()) +
                                       " ms; it goes on, and may be waited for again");
  }

  const at::Device device_;
  const std::vector<at::Tensor> outputs_;
  maniple_work* handle_ = nullptr;
  std::unique_ptr<c10::Event> end_ = {};  // after the copies that follow the operation; null: no copies
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ = {};
};

}  // namespace

bool built_for_cuda() { return true; }

c10::intrusive_ptr<c10d::Work> run_on_gpu(const std::shared_ptr<Engine>& engine, int rank, c10d::OpType type,
                                          const char* title, at::Device device, Operation operation) {
  const c10::cuda::CUDAGuard guard(device);
  auto work = c10::make_intrusive<GpuWork>(rank, type, title, device, operation);
  const bool message = type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
  std::unique_lock lock(engine->order, std::defer_lock);
  if (!message) {
    lock.lock();
    if (auto before = std::move(engine->deferred)) before->start_locked();
  }
  work->start(engine->group, std::move(operation));
  engine->gpu.store(device.index());
  return work;
}

void drain_current_stream(int index) { c10::cuda::getCurrentCUDAStream(index_of(index)).synchronize(); }

#else

bool built_for_cuda() { return false; }

c10::intrusive_ptr<c10d::Work> run_on_gpu(const std::shared_ptr<Engine>&, int, c10d::OpType, const char*, at::Device,
                                          Operation) {
  refuse("this module was built without CUDA");
}

void drain_current_stream(int) {}

#endif

}  // namespace maniple_torch
