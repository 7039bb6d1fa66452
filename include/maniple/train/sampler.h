// Which samples of a dataset this rank sees.
//
//   maniple::DistributedSampler sampler(dataset.size().value(), {.shuffle = true, .seed = 7});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, torch::data::DataLoaderOptions().batch_size(32));
//   for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                    // another order in every epoch, the same on all ranks
//     for (auto& batch : *loader) { ... }
//   }
//
// The samples are put in one order, by a generator of our own, so that it is the same on every rank, platform and version of
// LibTorch; rank r of R then takes places r, r + R, r + 2R, ... Together the ranks see all of the dataset, and no two ranks the
// same sample, with one exception that the mode decides:
//
//   training     all ranks take equally many samples, because a rank that makes a step more than the others would wait for
//                them in vain. When the size is no multiple of the ranks, the first few samples of the order are seen twice
//                (fewer than there are ranks), or with `drop_last` the last few by nobody.
//   evaluation   nothing twice and nothing left out, so that a sum over ranks is the sum over the dataset. Ranks may differ
//                by one sample, so do not communicate in the loop: add up, and all_reduce the sums after it.
//
// A copy of a sampler is the same sampler: make_data_loader keeps one copy, and set_epoch on yours reaches it.
//
// To go on in the middle of an epoch, keep a cursor. The loader's workers ask for indices ahead of time, so the sampler's own
// position is what was asked for; what was trained on is only known to the loop:
//
//   sampler.seek({.epoch = 3, .position = 128 * batch_size});   // the next pass begins there
//
// Errors are InvalidArgument. A sampler and its copies belong to one thread; DataLoader's workers do not touch it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <torch/data/samplers/base.h>

#include <maniple/comm/process_group.h>

namespace maniple {

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
  /// How far the sampler is: this rank has handed out `position` samples of the epoch's `local_size()`.
  struct Cursor {
    std::size_t epoch = 0;
    std::size_t position = 0;
    bool operator==(const Cursor&) const = default;
  };
  using OptionalSize = torch::optional<std::size_t>;
  using OptionalBatch = torch::optional<std::vector<std::size_t>>;

  explicit DistributedSampler(std::size_t dataset_size, SamplerOptions options = {});

  /// Chooses the order of the passes that follow. Call it before each pass, with the same number on all ranks; otherwise
  /// every epoch has the same order.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const noexcept;

  /// How many samples this rank takes in an epoch, repeated ones included.
  std::size_t local_size() const noexcept;
  /// How many batches that makes; the last may be smaller.
  std::size_t local_batches(std::size_t batch_size) const;
  std::size_t dataset_size() const noexcept;
  int num_replicas() const noexcept;
  int rank() const noexcept;

  /// Everything that this rank takes in the current epoch, in order.
  std::vector<std::size_t> indices() const;

  Cursor cursor() const noexcept;
  /// The next pass begins here instead of at the beginning of the epoch; the pass after it begins at the beginning.
  void seek(Cursor cursor);

  // ---- What torch::data calls ------------------------------------------------------------------------------------

  /// Begins a pass over the current epoch, of a dataset of another size if one is given.
  void reset(OptionalSize new_size = {}) override;
  /// The next indices, `batch_size` of them or what is left; nothing when the pass is over.
  OptionalBatch next(std::size_t batch_size) override;
  /// The cursor, with what it depends on (size, ranks, seed, mode). load() throws when those differ here, because the position
  /// would mean other samples; afterwards the next pass begins at the cursor.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace maniple
