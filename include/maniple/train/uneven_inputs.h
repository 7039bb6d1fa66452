// Training with different numbers of batches on the ranks.
//
//   maniple::with_uneven_inputs(ddp, [&] {
//     for (auto& batch : *loader) {                       // any number of batches on this rank
//       optimizer.zero_grad();
//       loss_of(ddp(batch.data)).backward();
//       optimizer.step();
//     }
//   });
//   // all ranks get here, and hold the same model
//
// Every synchronised backward needs all ranks. A rank whose function has returned *shadows* the others until all have
// returned: it makes the same collective calls with zero gradients (buckets, hooks, unused parameters, weights,
// buffers, and the layout of buckets if it never had a batch). Then every rank receives parameters and buffers from the
// first of the ranks that trained longest. This corresponds to PyTorch's Join context manager.
//
// Inside with_uneven_inputs each synchronised backward begins with one all_reduce of one byte per rank, which reports
// the ranks that still train.
//
// Only the communication of DistributedDataParallel is shadowed. The program's own collectives inside the function
// (such as the average of a loss) are not: a rank without batches does not call them, and all ranks get `Mismatch`.
// Call them after with_uneven_inputs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <maniple/comm/error.h>
#include <maniple/export.h>
#include <maniple/train/ddp.h>

namespace MANIPLE_API maniple {

struct UnevenInputsOptions {
  /// The divisor for the sum of gradients once ranks have run out. True: the number of all ranks, so that every sample
  /// of an epoch has the same weight, and steps become smaller towards its end. False: the number of ranks that still
  /// train. (With Average::samples, ranks that have run out have weight 0 in both cases.)
  bool divide_by_initial_world_size = true;

  /// False: no shadowing, the function is simply called. For ranks with equal numbers of batches.
  bool enable = true;

  /// True: instead of shadowing, all ranks throw `UnevenInputs` as soon as one has run out before the others. Ranks
  /// that still train throw it from backward(), before anything is averaged; the others throw it from
  /// with_uneven_inputs. The group and the model stay usable. For programs that prefer to drop the tail of an epoch.
  bool throw_on_early_termination = false;

  /// Called for each shadowed step on a rank that has run out. It must call `backward` once; when that returns, this
  /// rank has the same gradients as all other ranks. Empty: only `backward` is called. The rank's optimizer then falls
  /// behind (momentum, Adam's moments), although the rank receives the final parameters. To keep the optimizer up to
  /// date, take the same step as the other ranks:
  ///
  ///   .shadow_step = [&](auto& backward) { optimizer.zero_grad(); backward(); optimizer.step(); }
  std::function<void(const std::function<void()>& backward)> shadow_step = nullptr;
};

/// Some ranks had fewer batches than others, and throw_on_early_termination is set. Thrown on all ranks; the group
/// stays usable.
struct UnevenInputs : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

/// Collective: all ranks of ddp's group call it, with the same options. Exceptions from `train` are rethrown without
/// shadowing; the other ranks then fail as after any error (see docs/failure.md). Must not be nested for the same ddp.
void with_uneven_inputs(GradientAverager& ddp, const std::function<void()>& train);
void with_uneven_inputs(GradientAverager& ddp, const UnevenInputsOptions& options, const std::function<void()>& train);

/// For several wrapped modules: each step of `train` runs one synchronised backward per module, in this order.
void with_uneven_inputs(const std::vector<GradientAverager*>& ddps, const UnevenInputsOptions& options,
                        const std::function<void()>& train);

}  // namespace maniple
