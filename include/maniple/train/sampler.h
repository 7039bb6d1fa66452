// Selects the samples of a dataset that this rank processes.
//
//   maniple::DistributedSampler sampler(dataset.size().value(), {.shuffle = true, .seed = 7});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 32);
//   for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                    // a new order in every epoch, the same on all ranks
//     for (auto& batch : *loader) { ... }
//   }
//
// The samples are ordered by Maniple's own generator, so the order is the same on every rank, platform and LibTorch
// version. Rank r of R takes places r, r + R, r + 2R, ... Together the ranks process every sample exactly once if
// the size is a multiple of the number of ranks. Otherwise the mode decides:
//
// training     All ranks take the same number of samples, because a rank with an extra step would wait for the others
//              forever. The first few samples of the order (fewer than there are ranks) are used twice, or with
//              `drop_last` the last few are not used.
// evaluation   No sample is repeated or left out, so a sum over ranks is the sum over the dataset. The ranks' numbers
//              of samples may differ by one, so do not communicate in the loop: accumulate locally, and all_reduce the
//              sums after it.
//
// Copies of a sampler share their state: make_data_loader keeps a copy, and set_epoch on yours reaches it.
//
// To resume in the middle of an epoch, count the batches that the loop has trained on, and keep the cursor in the
// checkpoint:
//
//   checkpoint.add("model", *net).add("sampler", sampler);
//   auto step = checkpoint.load().value_or(0);
//   for (std::size_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                                 // the cursor's epoch: resumes where it stopped
//     for (auto& batch : sampler.counting(*loader)) {           // a batch counts once the loop has received it
//       ...
//       if (++step % 100 == 0) checkpoint.save(step);
//     }
//     scheduler.step();                                         // and other work at the end of an epoch
//     checkpoint.save(step);                                    // last: a restart begins with the next epoch
//   }
//
// The cursor is a place in the order of the epoch, common to all ranks: every sample before it has been taken, and no
// sample after it. A checkpoint may therefore be loaded on another number of ranks without repeating or losing a
// sample. The remainder is divided among the new ranks like a whole epoch; only its end is padded or cut. Batches that
// the loader's workers have fetched ahead do not count. One number serves all ranks because all ranks take the same
// number of batches of one size; rank 0's is saved.
//
// After the loop the cursor is at the beginning of the next epoch, and a checkpoint saved there resumes with that
// epoch. In the body of the loop, even with the last batch, it is in the current epoch: a run resumed from there still
// executes the code after the loop, once.
//
// Errors are InvalidArgument. Threads: a sampler and its copies belong to one thread; the workers of DataLoader do not
// use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/data/samplers/base.h>

#include <maniple/comm/error.h>
#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/virtual_ranks.h>

namespace MANIPLE_API maniple {

enum class SamplerMode { training, evaluation };

struct SamplerOptions {
  int num_replicas = 0;    ///< number of ranks that share the dataset; 0: the size of `group`
  int rank = -1;           ///< this rank's index among them; -1: the rank in `group`
  bool shuffle = true;     ///< false: in dataset order
  std::uint64_t seed = 0;  ///< seed of the shuffle; the same on all ranks
  bool drop_last = false;  ///< training: leave out the last few samples instead of repeating the first few
  SamplerMode mode = SamplerMode::training;
  std::shared_ptr<ProcessGroup> group = nullptr;  ///< null: the default group (init_process_group)
};

class DistributedSampler final : public torch::data::samplers::Sampler<> {
 public:
  /// Position of all ranks together: the first `places` of the epoch's dataset_size() places are done.
  struct Cursor {
    std::size_t epoch = 0;
    std::size_t places = 0;
    bool operator==(const Cursor&) const = default;
  };
  template <class Loader>
  class Counting;
  using OptionalSize = torch::optional<std::size_t>;
  using OptionalBatch = torch::optional<std::vector<std::size_t>>;

  explicit DistributedSampler(std::size_t dataset_size, SamplerOptions options = {});

  /// Selects the order of the following passes. Call it before each pass, with the same number on all ranks; otherwise
  /// every epoch has the same order.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const noexcept;

  /// Number of samples that this rank takes in the current or next pass: a whole epoch including repeated samples, or,
  /// after seek(), its remainder.
  std::size_t local_size() const noexcept;
  /// Number of batches in that pass; the last of each replica may be smaller, unless `drop_smaller` leaves it out.
  std::size_t local_batches(std::size_t batch_size, bool drop_smaller = false) const;
  std::size_t dataset_size() const noexcept;
  int num_replicas() const noexcept;  ///< after divide(): the number of virtual ranks
  int rank() const noexcept;          ///< after divide(): the first virtual rank of this rank

  /// All indices that this rank takes in that pass, in order; after divide(), virtual rank by virtual rank.
  std::vector<std::size_t> indices() const;

  /// From now on virtual ranks take the place of ranks: they divide the samples, and next() returns a batch for each
  /// virtual rank of this rank in turn. Batches of one turn have the same size, and the cursor counts complete turns.
  /// A position given by seek() is kept; a pass in progress ends. Throws InvalidArgument if `ranks` belongs to
  /// another rank, or to another number of ranks, than the sampler.
  void divide(const VirtualRanks& ranks);

  // ---- Position in the training ---------------------------------------------------------------------------------

  /// Iterates over the loader's batches, and counts each as done when the loop receives it; therefore save at the end
  /// of the loop's body or after the loop. Throws if the loader returns batches in arbitrary order
  /// (enforce_ordering(false)), because then the finished batches are not a prefix of the order.
  template <class Loader>
  Counting<Loader> counting(Loader& loader) const;

  /// Counts by hand, for loops that call next(): marks the oldest batch that was handed out and not yet counted as
  /// done. Throws if there is none.
  void batch_done();

  /// After the last batch of a pass the cursor is at the end of the epoch, also with drop_last. It moves to the
  /// beginning of the next epoch when the loop over counting() ends (by hand: when next() has returned nothing and all
  /// batches are counted). Throws if batches were handed out and none was counted, because the position is then
  /// unknown.
  Cursor cursor() const;
  /// The next pass begins here instead of at the beginning of the epoch; later passes begin at the beginning. A pass
  /// that begins at the end of the epoch is empty.
  void seek(Cursor cursor);

  /// The cursor as text, together with what it depends on: "epoch 3, place 512 of 60000, shuffle 1, seed 7".
  /// Checkpoint::add saves it.
  std::string cursor_text() const;
  /// Seeks to a saved cursor. Throws if size, shuffle or seed differ, because the place would refer to other samples.
  /// The number of ranks, drop_last and mode may differ.
  void load_cursor(const std::string& text);

  // ---- Interface for torch::data --------------------------------------------------------------------------------

  /// Begins a pass over the current epoch. `new_size` is the size of a new dataset, if given.
  void reset(OptionalSize new_size = {}) override;
  /// The next indices: `batch_size` of them, or fewer at the end; nothing when the pass is over.
  OptionalBatch next(std::size_t batch_size) override;
  /// Saves cursor_text() in torch's archives; load() reads it.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void loop_began();
  void loop_ended();

  struct State;
  std::shared_ptr<State> state_;
};

/// The result of counting(): the loader, for one loop.
template <class Loader>
class DistributedSampler::Counting {
  using Base = decltype(std::declval<Loader&>().begin());

 public:
  class Iterator {
   public:
    Iterator(Base base, DistributedSampler sampler) : base_(std::move(base)), sampler_(std::move(sampler)) {}
    auto& operator*() {
      auto& batch = *base_;
      if (!std::exchange(counted_, true)) sampler_.batch_done();
      return batch;
    }
    auto* operator->() { return &**this; }
    Iterator& operator++() {
      ++base_;
      counted_ = false;
      return *this;
    }
    bool operator!=(const Iterator& other) {
      const bool more = base_ != other.base_;
      if (!more) sampler_.loop_ended();
      return more;
    }

   private:
    Base base_;
    DistributedSampler sampler_;
    bool counted_ = false;
  };

  Counting(Loader& loader, DistributedSampler sampler) : loader_(&loader), sampler_(std::move(sampler)) {}
  Iterator begin() {
    Iterator first(loader_->begin(), sampler_);  // the loader begins a pass
    sampler_.loop_began();
    return first;
  }
  Iterator end() { return Iterator(loader_->end(), sampler_); }

 private:
  Loader* loader_;
  DistributedSampler sampler_;
};

template <class Loader>
DistributedSampler::Counting<Loader> DistributedSampler::counting(Loader& loader) const {
  if (loader.options().workers > 1 && !loader.options().enforce_ordering)
    throw InvalidArgument(
        "DistributedSampler: the loader hands out batches in any order, so there is no place up to which all are done; "
        "leave DataLoaderOptions::enforce_ordering on to count them");
  return Counting<Loader>(loader, *this);
}

// ---- Dividing totals among the processes of a job -----------------------------------------------------------
//
// 8 ranks train like one process with a batch of 256 if each rank takes 32.

/// The batch size of one process, so that all processes together take `global_batch` samples per step. Throws
/// InvalidArgument if `global_batch` is not a multiple of `world_size`: rounding would silently change the batch, and
/// with it the best learning rate. The error text names the nearest sizes that work.
std::size_t per_process_batch_size(std::size_t global_batch, int world_size);

/// Loader workers for one process: `total_workers` divided by `world_size`, rounded up, so that each process has at
/// least one, unless `total_workers` is 0 (the loop itself reads the data).
std::size_t per_process_workers(std::size_t total_workers, int world_size);

}  // namespace maniple
