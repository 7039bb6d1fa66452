// PowerSGD: gradients that travel as products of two thin matrices (Vogels, Karimireddy, Jaggi 2019).
//
//   auto state = std::make_shared<maniple::PowerSGDState>(maniple::PowerSGDOptions{.matrix_approximation_rank = 2,
//                                                                                  .start_powerSGD_iter = 1000});
//   ddp.register_comm_hook(maniple::powerSGD_hook(state));
//   ...
//   std::cout << state->traffic().compression_rate();
//
// A gradient of two or more dimensions is seen as a matrix M of n rows (its first dimension) and m columns. With a
// matrix Q of m x r, known to all ranks, each computes P = M Q; P is averaged and its columns are made orthonormal;
// each computes Q = Mt P, which is averaged too; and the gradient of all is P Qt: the average of all M, projected onto
// the r directions of P. Instead of n m numbers, r (n + m) travel. If the average has rank r or less, nothing is lost
// but rounding.
//
// Two things make it train well. *Error feedback*: what the approximation left out on this rank is added to its next
// gradient. *Warm start*: Q is used again in the next step, which is one step of a power iteration, so that P turns
// towards the strongest directions.
//
// Gradients of one dimension, and those for which it does not pay (see min_compression_rate), are averaged as they are,
// in the same message as the Ps. Two collectives for each bucket. They run in backward's thread, whatever `overlap`
// says, because the second needs the result of the first; so the hook pays on slow networks only.
//
// float16 and bfloat16 gradients are computed and sent in float32. Complex ones are averaged as they are. Gradients
// that are not finite: every compressed gradient of that bucket is NaN on all ranks in that step, and the bucket's
// memory (errors and Qs) is forgotten, so that the next step is sound again.
//
// All ranks give the same options. One state for each DistributedDataParallel. Bits are the same on all ranks if their
// processors have the same vector instructions.
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
  /// r. 1 or 2 compress most; larger ones are more exact and cost in proportion. At least 1.
  int matrix_approximation_rank = 1;
  /// So many synchronised backwards are averaged as they are: early gradients are hard to approximate.
  std::int64_t start_powerSGD_iter = 1000;
  /// A gradient is compressed if r (n + m) times this is less than n m.
  double min_compression_rate = 2;
  bool use_error_feedback = true;
  bool warm_start = true;
  /// Added to the length of each column where columns are made orthonormal. Columns that depend on others are replaced
  /// by random directions, so 0 is safe.
  double orthogonalization_epsilon = 0;
  /// Of the first Qs (of all of them, without warm start).
  std::uint64_t random_seed = 0;
};

class PowerSGDState {
 public:
  explicit PowerSGDState(PowerSGDOptions options = {});  ///< throws InvalidArgument naming the option
  ~PowerSGDState();

  const PowerSGDOptions& options() const noexcept;
  std::int64_t iteration() const noexcept;  ///< synchronised backwards so far
  HookTraffic traffic() const noexcept;

  /// Makes the errors of all ranks equal, to their average. As only the sum over ranks enters the gradients, training
  /// goes on as before; but now one rank's state stands for all, and it may be loaded by another number of ranks.
  /// Collective.
  void average_errors(ProcessGroup& group);

  /// Copies of all that it remembers: "error/fc1.weight", "q/fc1.weight", "iteration". Loading replaces everything.
  /// Throws InvalidArgument, naming the entry, for one that cannot be.
  std::map<std::string, torch::Tensor> state_dict() const;
  void load_state_dict(const std::map<std::string, torch::Tensor>& state);

  /// The same in a safetensors file. Either each rank has a file of its own, or average_errors() is called first and
  /// one rank saves.
  void save(const std::string& path) const;
  void load(const std::string& path);

 private:
  friend CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace maniple
