// The backend "maniple" of torch.distributed.
//
// Since PyTorch 2.0 a backend derives from c10d::Backend, before it was c10d::ProcessGroup; the operations are the
// same. Methods that only some versions have are not marked `override`: they override where there is something to
// override.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/version.h>

#if TORCH_VERSION_MAJOR >= 2
#include <torch/csrc/distributed/c10d/Backend.hpp>
#else
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#endif

#include "tensors.h"
#include "work.h"

namespace maniple_torch {

#if TORCH_VERSION_MAJOR >= 2
using Base = c10d::Backend;
#else
using Base = c10d::ProcessGroup;
#endif
using Milliseconds = std::chrono::milliseconds;
using BasePointer = c10::intrusive_ptr<Base>;
using StorePointer = c10::intrusive_ptr<c10d::Store>;
using OptionsPointer = c10::intrusive_ptr<Base::Options>;

/// Python copies what it gets as the options of a group, which the base class does not allow.
struct BackendOptions : Base::Options {
  explicit BackendOptions(Milliseconds limit) : Base::Options("maniple", limit) {}
};

/// Whether this version's groups are split by their backends. (Those of others, if at all, by NCCL alone.)
template <class B>
concept Splits = requires(B& backend, const StorePointer& store, const std::vector<int>& ranks,
                          const OptionsPointer& options) { backend.split(store, ranks, options); };

using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
class Backend : public Base {
 public:
  /// Takes the group, whose default time limit this is.
  Backend(maniple_group* group, int rank, int size, double timeout_s);
  ~Backend() override;

  const std::string getBackendName() const override { return "maniple"; }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) override;
  virtual WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options);
  WorkPointer gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  virtual WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options);
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPointer send(Tensors& tensors, int peer, int tag) override;
  WorkPointer recv(Tensors& tensors, int peer, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;

  void startCoalescing() override;
#if TORCH_VERSION_MAJOR >= 2
  WorkPointer endCoalescing() override;
#else
  void endCoalescing(std::vector<WorkPointer>& works) override;
#endif

  // Every collective has the number that Maniple's messages show, from 1.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }

  virtual void setTimeout(Milliseconds timeout) { options_->timeout = timeout; }
  /// What Python shows as `options`: a time limit that is set there counts, too.
  virtual OptionsPointer getBackendOptions() { return options_; }
  virtual bool supportsSplitting() const { return Splits<Base>; }
  /// A group of some of this one's ranks, which alone have a part in it; null on the others. PyTorch calls this for
  /// each type of device, and gets the same group.
  virtual BasePointer split(const StorePointer& store, const std::vector<int>& ranks, const OptionsPointer& options);
  /// A group that meets in a store: this one's ranks are among its ranks.
  virtual BasePointer merge(const StorePointer& store, const OptionsPointer& options, const int& rank, const int& size);
  virtual void eagerConnectSingleDevice(at::Device) {}  // connected when it was made
  virtual void abort();
  virtual void shutdown();
  virtual bool supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }  // -1 is the CPU
  /// Registered memory. Collective.
  virtual at::Tensor allocateTensor(long size, at::TensorOptions options);
  /// Moves a contiguous tensor that has its storage for itself, and whoever shares that storage, to registered memory.
  /// Collective: it allocates the memory in any case, and returns false where the tensor is not of that kind. Pointers
  /// into the old memory dangle.
  bool move_to_registered(const at::Tensor& tensor);
  /// An average over the ranks, in place, in this thread: nothing is handed to another.
  void average_here(const at::Tensor& tensor);

  /// The engine of the group, and its device.
  struct Choice {
    std::string engine = "native";
    int device = -1;
  };
  void set_choice(Choice choice) { choice_ = std::move(choice); }

  maniple_group* group() const { return engine_->group; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  double limit(Milliseconds timeout) const;
  /// Calls a collective of so many bytes.
  WorkPointer call(c10d::OpType type, const char* title, std::size_t bytes, Milliseconds timeout, Operation operation);
  WorkPointer message(c10d::OpType type, const char* title, const Memory& memory, int peer, int tag);
  WorkPointer allreduce_of_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  WorkPointer note(WorkPointer work);
  void require_ranks(const char* op, std::size_t count) const;
  /// Here, and not when the operation runs: then the call itself fails.
  int require_root(const char* op, int64_t root) const;

  std::shared_ptr<Engine> engine_;
  c10::intrusive_ptr<BackendOptions> options_;
  Choice choice_;
  StorePointer split_store_;                     // of the last split, which tells one from the next,
  c10::weak_intrusive_ptr<Base> split_backend_;  // and its group
  std::map<std::string, int> split_names_;       // how many had a name
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<WorkPointer> coalesced_;
};
#ifdef __clang__
#pragma clang diagnostic pop
#endif

}  // namespace maniple_torch
