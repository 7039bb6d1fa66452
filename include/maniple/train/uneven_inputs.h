// Ranks with different numbers of batches.
//
//   maniple::with_uneven_inputs(ddp, [&] {
//     for (auto& batch : *loader) {                       // as many as this rank happens to have
//       optimizer.zero_grad();
//       loss_of(ddp(batch.data)).backward();
//       optimizer.step();
//     }
//   });
//   // all ranks are here, and hold the same model
//
// Every synchronised backward needs all ranks. A rank whose function has returned *shadows* the others: it makes the
// same collective calls with gradients of zero (buckets, hooks, unused parameters, weights, buffers, and the laying out
// of buckets if it never had a batch), until all have returned. Then every rank gets parameters and buffers from the
// first of those that trained last. This is PyTorch's Join context manager.
//
// Meanwhile each synchronised backward begins with one all_reduce of a byte for each rank, which says who still trains.
//
// What is shadowed is what DistributedDataParallel communicates. Collectives of the program's own inside the function
// (the average of a loss, say) are not: a rank without batches does not call them, and all get `Mismatch`. Do those
// after it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <maniple/comm/error.h>
#include <maniple/export.h>
#include <maniple/train/ddp.h>

namespace MANIPLE_API maniple {

struct UnevenInputsOptions {
  /// What the sum of gradients is divided by once ranks have run out. True: by the number of all ranks, so that every
  /// sample of an epoch has the same weight, and steps become smaller towards its end. False: by the number of ranks
  /// that still train. (With Average::samples ranks that have run out have weight 0 either way.)
  bool divide_by_initial_world_size = true;

  /// False: nothing is shadowed, the function is just called. For ranks that are known to have equally many.
  bool enable = true;

  /// True: instead of shadowing, all ranks throw `UnevenInputs` as soon as one has run out before the others: those
  /// that train out of backward(), before anything was averaged, the others out of with_uneven_inputs. The group and
  /// the model are as good as before. For programs that would rather drop the tail of an epoch.
  bool throw_on_early_termination = false;

  /// What a rank that has run out does for each step that it shadows: it has to call `backward` once, which ends when
  /// the gradients of this rank are those of all others. Empty: no more than that. Then its optimizer falls behind
  /// (momentum, Adam's moments), although it gets the final parameters. To keep up, take the same step as the others:
  ///
  ///   .shadow_step = [&](auto& backward) { optimizer.zero_grad(); backward(); optimizer.step(); }
  std::function<void(const std::function<void()>& backward)> shadow_step = nullptr;
};

/// Some ranks had fewer batches than others, and throw_on_early_termination was set. Thrown on all ranks; the group
/// stays usable.
struct UnevenInputs : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

/// Collective: all ranks of ddp's group call it, with the same options. What `train` throws is thrown on, without any
/// shadowing; the other ranks then fail as with any error (see failure.md). May not be nested for one ddp.
void with_uneven_inputs(GradientAverager& ddp, const std::function<void()>& train);
void with_uneven_inputs(GradientAverager& ddp, const UnevenInputsOptions& options, const std::function<void()>& train);

/// Several wrapped modules, of which every step of `train` runs one synchronised backward each, in this order.
void with_uneven_inputs(const std::vector<GradientAverager*>& ddps, const UnevenInputsOptions& options,
                        const std::function<void()>& train);

}  // namespace maniple
