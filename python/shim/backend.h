// The backend "maniple" of torch.distributed.
//
// A backend derives from c10d::Backend since PyTorch 2.0, and from c10d::ProcessGroup before; the operations are the
// same. Methods that exist only in some versions are not marked `override`.
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

/// Python copies a group's options, which the base class does not allow.
struct BackendOptions : Base::Options {
  explicit BackendOptions(Milliseconds limit) : Base::Options("maniple", limit) {}
};

/// Whether this PyTorch version splits groups through their backends. (Other versions split only NCCL's, if any.)
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
  /// Takes ownership of the group; `timeout_s` is its default time limit.
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

  // Collectives are numbered from 1, as in Maniple's messages.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }

  virtual void setTimeout(Milliseconds timeout) { options_->timeout = timeout; }
  /// Python's `options` of the group. A time limit set there takes effect, too.
  virtual OptionsPointer getBackendOptions() { return options_; }
  virtual bool supportsSplitting() const { return Splits<Base>; }
  /// Creates a group of some of this group's ranks; null on the other ranks, which do not take part. PyTorch calls this
  /// once per device type, and gets the same group.
  virtual BasePointer split(const StorePointer& store, const std::vector<int>& ranks, const OptionsPointer& options);
  /// Creates a group that includes this group's ranks and connects through `store`.
  virtual BasePointer merge(const StorePointer& store, const OptionsPointer& options, const int& rank, const int& size);
  virtual void eagerConnectSingleDevice(at::Device) {}  // connected since its construction
  virtual void abort();
  virtual void shutdown();
  virtual bool supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }  // -1 is the CPU
  /// Allocates registered memory. Collective.
  virtual at::Tensor allocateTensor(long size, at::TensorOptions options);
  /// Moves a contiguous tensor that fills its storage, and all tensors that share the storage, to registered memory.
  /// Collective: always allocates the memory, and returns false if the tensor is not of that kind. Pointers into the
  /// old memory dangle.
  bool move_to_registered(const at::Tensor& tensor);
  /// Averages over the ranks, in place and in the calling thread.
  void average_here(const at::Tensor& tensor);

  /// The group's engine and device.
  struct Choice {
    std::string engine = "native";
    int device = -1;
  };
  void set_choice(Choice choice) { choice_ = std::move(choice); }

  maniple_group* group() const { return engine_->group; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  double limit(Milliseconds timeout) const;
  /// Calls a collective on `bytes` bytes.
  WorkPointer call(c10d::OpType type, const char* title, std::size_t bytes, Milliseconds timeout, Operation operation);
  WorkPointer message(c10d::OpType type, const char* title, const Memory& memory, int peer, int tag);
  WorkPointer allreduce_of_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  WorkPointer note(WorkPointer work);
  void require_ranks(const char* op, std::size_t count) const;
  /// Checked before the operation runs, so that the call itself fails.
  int require_root(const char* op, int64_t root) const;

  std::shared_ptr<Engine> engine_;
  c10::intrusive_ptr<BackendOptions> options_;
  Choice choice_;
  StorePointer split_store_;                     // the last split's store, which identifies the split
  c10::weak_intrusive_ptr<Base> split_backend_;  // the last split's group
  std::map<std::string, int> split_names_;       // number of splits per name
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<WorkPointer> coalesced_;
};
#ifdef __clang__
#pragma clang diagnostic pop
#endif

}  // namespace maniple_torch
