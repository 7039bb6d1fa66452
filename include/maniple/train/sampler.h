// Which samples of a dataset this rank sees.
//
//   maniple::DistributedSampler sampler(dataset.size().value(), {.shuffle = true, .seed = 7});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 32);
//   for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                    // another order in every epoch, the same on all ranks
//     for (auto& batch : *loader) { ... }
//   }
//
// The samples are put in one order, by a generator of our own, so that it is the same on every rank, platform and
// version of LibTorch; rank r of R then takes places r, r + R, r + 2R, ... Together the ranks see all of the dataset,
// and no two ranks the same sample, with one exception that the mode decides:
//
//   training     all ranks take equally many samples, because a rank that makes a step more than the others would wait
//                for them in vain. When the size is no multiple of the ranks, the first few samples of the order are
//                seen twice (fewer than there are ranks), or with `drop_last` the last few by nobody.
//   evaluation   nothing twice and nothing left out, so that a sum over ranks is the sum over the dataset. Ranks may
//                differ by one sample, so do not communicate in the loop: add up, and all_reduce the sums after it.
//
// A copy of a sampler is the same sampler: make_data_loader keeps one copy, and set_epoch on yours reaches it.
//
// To go on in the middle of an epoch, count what the loop has trained on, and keep the cursor in the checkpoint:
//
//   checkpoint.add("model", *net).add("sampler", sampler);
//   auto step = checkpoint.load().value_or(0);
//   for (std::size_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                                 // the epoch of the cursor: it goes on where it stopped
//     for (auto& batch : sampler.counting(*loader)) {           // a batch counts once the loop has it
//       ...
//       if (++step % 100 == 0) checkpoint.save(step);
//     }
//     scheduler.step();                                         // and whatever else belongs to the end of an epoch
//     checkpoint.save(step);                                    // last: a restart begins with the next epoch
//   }
//
// The cursor is a place in the order of the epoch, for all ranks together: everything before it was taken, nothing
// behind it. So it may be loaded on another number of ranks, and no sample is repeated or lost: the rest is divided
// among the new ranks as a whole epoch would be, and only its end is filled up or cut. It does not count what the
// loader's workers have asked for ahead of time. It is one number for all ranks because all take equally many batches,
// of one size; rank 0's is the one that is saved.
//
// Behind the loop the cursor is the beginning of the next epoch: what was saved there goes on with that one. In the
// body of the loop, even with the last batch, it is in this epoch: what was saved there still does what comes behind
// the loop, once.
//
// Errors are InvalidArgument. A sampler and its copies belong to one thread; DataLoader's workers do not touch it.
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

namespace MANIPLE_API maniple {

enum class SamplerMode { training, evaluation };

struct SamplerOptions {
  int num_replicas = 0;    ///< how many ranks share the dataset; 0: the size of `group`
  int rank = -1;           ///< this rank's place among them; -1: the rank in `group`
  bool shuffle = true;     ///< false: in the order of the dataset
  std::uint64_t seed = 0;  ///< of the shuffle; the same on all ranks
  bool drop_last = false;  ///< training: leave out the last few samples rather than repeat the first few
  SamplerMode mode = SamplerMode::training;
  std::shared_ptr<ProcessGroup> group = nullptr;  ///< null: the default group (init_process_group)
};

class DistributedSampler final : public torch::data::samplers::Sampler<> {
 public:
  /// How far all ranks together are: the first `places` places of the epoch's order are done, of dataset_size().
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

  /// Chooses the order of the passes that follow. Call it before each pass, with the same number on all ranks;
  /// otherwise every epoch has the same order.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const noexcept;

  /// How many samples this rank takes in the pass that is under way, or that comes next: an epoch, repeated samples
  /// included, or after seek() the rest of it.
  std::size_t local_size() const noexcept;
  /// How many batches that makes; the last may be smaller.
  std::size_t local_batches(std::size_t batch_size) const;
  std::size_t dataset_size() const noexcept;
  int num_replicas() const noexcept;
  int rank() const noexcept;

  /// Everything that this rank takes in that pass, in order.
  std::vector<std::size_t> indices() const;

  // ---- Where training is -----------------------------------------------------------------------------------------

  /// The loader's batches, each counted as done when the loop gets it: so save at the end of the loop's body, or after
  /// it. Throws when the loader hands out batches in any order (enforce_ordering(false)): what is done would be no
  /// beginning of the order.
  template <class Loader>
  Counting<Loader> counting(Loader& loader) const;

  /// The same by hand, for loops that call next(): the oldest batch that was handed out and not counted yet is done.
  /// Throws when there is none.
  void batch_done();

  /// After the last batch of a pass it is at the end of the epoch, with drop_last too; once the loop over counting()
  /// has ended (or, by hand, next() has returned nothing and all is counted) at the beginning of the next. Throws when
  /// batches were handed out and none was ever counted, because then nobody knows where training is.
  Cursor cursor() const;
  /// The next pass begins here instead of at the beginning of the epoch; the pass after it begins at the beginning. At
  /// the end of the epoch it is empty.
  void seek(Cursor cursor);

  /// The cursor as text, with what it depends on: "epoch 3, place 512 of 60000, shuffle 1, seed 7". Checkpoint::add
  /// keeps it.
  std::string cursor_text() const;
  /// Seeks there. Throws when size, shuffle or seed are others here, because the place would mean other samples. The
  /// number of ranks, drop_last and mode may be others.
  void load_cursor(const std::string& text);

  // ---- What torch::data calls ------------------------------------------------------------------------------------

  /// Begins a pass over the current epoch, of a dataset of another size if one is given.
  void reset(OptionalSize new_size = {}) override;
  /// The next indices, `batch_size` of them or what is left; nothing when the pass is over.
  OptionalBatch next(std::size_t batch_size) override;
  /// cursor_text() and load_cursor() in torch's archives.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void loop_began();
  void loop_ended();

  struct State;
  std::shared_ptr<State> state_;
};

/// What counting() gives: the loader, for one loop.
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

// ---- Dividing what is given for the whole job among its processes ---------------------------------------------------
//
// A program on 8 ranks with a batch of 256 trains as one process with a batch of 256 does, if each rank takes 32.

/// The batch of one process, so that all together take `global_batch` samples in a step. Throws InvalidArgument when it
/// is no multiple of `world_size`: rounding would silently change the batch, and with it the learning rate that fits.
/// The text names the nearest sizes that work.
std::size_t per_process_batch_size(std::size_t global_batch, int world_size);

/// The loader's workers of one process: `total_workers` over `world_size`, rounded up, so that nobody is left without
/// one unless there are to be none at all (0: the loop itself reads the data).
std::size_t per_process_workers(std::size_t total_workers, int world_size);

}  // namespace maniple
