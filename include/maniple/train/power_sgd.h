// PowerSGD: a communication hook that sends gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi
// 2019).
//
//   auto state = std::make_shared<maniple::PowerSGDState>(maniple::PowerSGDOptions{.matrix_approximation_rank = 2,
//                                                                                  .start_powerSGD_iter = 1000});
//   ddp.register_comm_hook(maniple::powerSGD_hook(state));
//   ...
//   std::cout << state->traffic().compression_rate();
//
// A gradient of two or more dimensions is treated as a matrix M with n rows (its first dimension) and m columns. All
// ranks know a matrix Q of m x r. Each rank computes P = M Q; P is averaged, and its columns are made orthonormal. Each
// rank then computes Q = Mt P, which is averaged, too. The resulting gradient on all ranks is P Qt: the average of all
// M, projected onto the r directions of P. This sends r (n + m) numbers instead of n m. If the average has rank r or
// less, only rounding errors remain.
//
// Two techniques preserve convergence. *Error feedback*: the approximation error on this rank is added to its next
// gradient. *Warm start*: Q is reused in the next step, which makes each step one step of a power iteration, so that P
// turns towards the dominant directions.
//
// One-dimensional gradients, and gradients for which compression does not pay (see min_compression_rate), are averaged
// without compression, in the same message as the matrices P. Each bucket takes two collectives. They run in the thread
// of backward, whatever `overlap` is set to, because the second needs the result of the first; so the hook pays only on
// slow networks.
//
// float16 and bfloat16 gradients are computed and sent in float32. Complex gradients are averaged without compression.
// If a gradient is not finite, all compressed gradients of its bucket are NaN on all ranks in that step. The bucket's
// state (errors and Qs) is then discarded, so the next step is correct again.
//
// All ranks use the same options. Each DistributedDataParallel needs its own state. Results are bit for bit equal on
// all ranks if their processors have the same vector instructions.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/comm_hooks.h>

namespace MANIPLE_API maniple {

struct PowerSGDOptions {
  /// r. 1 or 2 compress most; larger values are more exact and cost proportionally more. At least 1.
  int matrix_approximation_rank = 1;
  /// Number of synchronised backwards without compression: early gradients are hard to approximate.
  std::int64_t start_powerSGD_iter = 1000;
  /// A gradient is compressed if r (n + m) times this value is less than n m.
  double min_compression_rate = 2;
  bool use_error_feedback = true;
  bool warm_start = true;
  /// Added to the norm of each column during orthonormalization. Linearly dependent columns are replaced by random
  /// directions, so 0 is safe.
  double orthogonalization_epsilon = 0;
  /// Seed of the initial Qs (without warm start, of all Qs).
  std::uint64_t random_seed = 0;
};

class PowerSGDState {
 public:
  explicit PowerSGDState(PowerSGDOptions options = {});  ///< throws InvalidArgument, which names the option
  ~PowerSGDState();

  const PowerSGDOptions& options() const noexcept;
  std::int64_t iteration() const noexcept;  ///< synchronised backwards so far
  HookTraffic traffic() const noexcept;

  /// Replaces the errors of all ranks by their average. Only the sum over ranks enters the gradients, so training
  /// continues as before; but now one rank's state represents all ranks, and another number of ranks may load it.
  /// Collective.
  void average_errors(ProcessGroup& group);

  /// Copies of the complete state: "error/fc1.weight", "q/fc1.weight", "iteration". Loading replaces the state. Throws
  /// InvalidArgument, which names an invalid entry.
  std::map<std::string, torch::Tensor> state_dict() const;
  void load_state_dict(const std::map<std::string, torch::Tensor>& state);

  /// The same in a safetensors file. Either each rank has its own file, or call average_errors() first and save on one
  /// rank.
  void save(const std::string& path) const;
  void load(const std::string& path);

 private:
  friend CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace maniple
