#include <maniple/train/sampler.h>

#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "base/check.h"
#include "train/data/permutation.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

struct Share {
  int num_replicas;
  int rank;
};

Share share_of(const SamplerOptions& options) {
  Share share{options.num_replicas, options.rank};
  if (share.num_replicas == 0 || share.rank == -1) {
    MANIPLE_REQUIRE(options.group || is_initialized(),
                    "DistributedSampler: there is no default group; call init_process_group() first, or give .group, "
                    "or both .num_replicas and .rank");
    const auto group = options.group ? options.group : get_default_group();
    if (share.num_replicas == 0) share.num_replicas = group->size();
    if (share.rank == -1) share.rank = group->rank();
  }
  MANIPLE_REQUIRE(share.num_replicas > 0,
                  "DistributedSampler: num_replicas is {}; expected 1 or more (0: the size of the group)",
                  share.num_replicas);
  MANIPLE_REQUIRE(share.rank >= 0 && share.rank < share.num_replicas,
                  "DistributedSampler: rank is {}; expected 0 to {}, as num_replicas is {}", share.rank,
                  share.num_replicas - 1, share.num_replicas);
  return share;
}

}  // namespace

struct DistributedSampler::State {
  std::size_t size;
  std::size_t ranks;
  std::size_t rank;
  bool shuffle;
  std::uint64_t seed;
  bool drop_last;
  SamplerMode mode;

  Cursor cursor = {};
  bool stays = false;  ///< the next reset keeps the cursor
  std::vector<std::uint32_t> narrow =
      {};  ///< this rank's indices, when they fit; both empty when not made yet or not shuffled
  std::vector<std::uint64_t> wide = {};

  std::size_t local_size() const {
    const std::size_t whole = size / ranks;
    const std::size_t rest = size % ranks;
    if (mode == SamplerMode::evaluation) return whole + (rank < rest ? 1 : 0);
    return whole + (rest != 0 && !drop_last ? 1 : 0);
  }

  /// The place in the order that this rank's i-th sample has. Past its end the order begins again.
  std::size_t place(std::size_t i) const { return (rank + i * ranks) % size; }

  template <class Index>
  std::vector<Index> own_part() const {
    const auto order = random_order<Index>(size, mixed(seed + SplitMix::kStep * (cursor.epoch + 1)));
    std::vector<Index> part(local_size());
    for (std::size_t i = 0; i < part.size(); ++i) part[i] = order[place(i)];
    return part;
  }

  /// Shuffles if that is still to be done for this epoch.
  void prepare() {
    if (!shuffle || !narrow.empty() || !wide.empty() || local_size() == 0) return;
    if (size - 1 <= std::numeric_limits<std::uint32_t>::max()) {
      narrow = own_part<std::uint32_t>();
    } else {
      wide = own_part<std::uint64_t>();
    }
  }

  void forget_order() {
    narrow = {};
    wide = {};
  }

  std::size_t index(std::size_t i) const { return !narrow.empty() ? narrow[i] : !wide.empty() ? wide[i] : place(i); }
};

DistributedSampler::DistributedSampler(std::size_t dataset_size, SamplerOptions options) {
  const Share share = share_of(options);
  MANIPLE_REQUIRE(
      !(options.drop_last && options.mode == SamplerMode::evaluation),
      "DistributedSampler: drop_last leaves samples out, and mode is evaluation, which promises not to; choose one");
  MANIPLE_REQUIRE(dataset_size <= std::numeric_limits<std::size_t>::max() / 2,
                  "DistributedSampler: a dataset of {} samples; was a negative number converted?", dataset_size);
  state_ = std::make_shared<State>(State{.size = dataset_size,
                                         .ranks = static_cast<std::size_t>(share.num_replicas),
                                         .rank = static_cast<std::size_t>(share.rank),
                                         .shuffle = options.shuffle,
                                         .seed = options.seed,
                                         .drop_last = options.drop_last,
                                         .mode = options.mode});
}

void DistributedSampler::set_epoch(std::size_t epoch) {
  if (epoch == state_->cursor.epoch) return;  // after seek(), the usual call at the head of the loop changes nothing
  state_->cursor = {epoch, 0};
  state_->stays = false;
  state_->forget_order();
}

std::size_t DistributedSampler::epoch() const noexcept { return state_->cursor.epoch; }
std::size_t DistributedSampler::local_size() const noexcept { return state_->local_size(); }
std::size_t DistributedSampler::dataset_size() const noexcept { return state_->size; }
int DistributedSampler::num_replicas() const noexcept { return static_cast<int>(state_->ranks); }
int DistributedSampler::rank() const noexcept { return static_cast<int>(state_->rank); }
DistributedSampler::Cursor DistributedSampler::cursor() const noexcept { return state_->cursor; }

std::size_t DistributedSampler::local_batches(std::size_t batch_size) const {
  MANIPLE_REQUIRE(batch_size > 0, "DistributedSampler: a batch size of 0");
  return local_size() / batch_size + (local_size() % batch_size != 0 ? 1 : 0);
}

std::vector<std::size_t> DistributedSampler::indices() const {
  state_->prepare();
  std::vector<std::size_t> result(local_size());
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = state_->index(i);
  return result;
}

void DistributedSampler::seek(Cursor cursor) {
  MANIPLE_REQUIRE(cursor.position <= local_size(),
                  "DistributedSampler: position {} is behind the end; rank {} takes {} samples in an epoch",
                  cursor.position, state_->rank, local_size());
  if (cursor.epoch != state_->cursor.epoch) state_->forget_order();
  state_->cursor = cursor;
  state_->stays = true;
}

void DistributedSampler::reset(OptionalSize new_size) {
  if (new_size && *new_size != state_->size) {
    state_->size = *new_size;
    state_->stays = false;
    state_->forget_order();
  }
  if (!state_->stays) state_->cursor.position = 0;
  state_->stays = false;
}

DistributedSampler::OptionalBatch DistributedSampler::next(std::size_t batch_size) {
  MANIPLE_REQUIRE(batch_size > 0, "DistributedSampler: a batch size of 0");
  std::size_t& position = state_->cursor.position;
  const std::size_t count = std::min(batch_size, local_size() - position);
  if (count == 0) return {};
  state_->prepare();
  std::vector<std::size_t> batch(count);
  for (std::size_t& index : batch) index = state_->index(position++);
  return batch;
}

namespace {

// The words under which the archive holds a sampler, with the value each must have for the cursor to mean the same.
void write_number(torch::serialize::OutputArchive& archive, const char* key, std::uint64_t value) {
  archive.write(key, torch::tensor(static_cast<std::int64_t>(value), torch::kInt64), /*is_buffer=*/true);
}

std::uint64_t read_number(torch::serialize::InputArchive& archive, const char* key) {
  torch::Tensor value;
  MANIPLE_REQUIRE(
      archive.try_read(key, value, /*is_buffer=*/true) && value.numel() == 1 && value.scalar_type() == torch::kInt64,
      "DistributedSampler: the archive holds no number \"{}\"; it was not written by save() of a DistributedSampler",
      key);
  return static_cast<std::uint64_t>(value.item<std::int64_t>());
}

}  // namespace

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  write_number(archive, "epoch", state_->cursor.epoch);
  write_number(archive, "position", state_->cursor.position);
  write_number(archive, "dataset_size", state_->size);
  write_number(archive, "num_replicas", state_->ranks);
  write_number(archive, "rank", state_->rank);
  write_number(archive, "shuffle", state_->shuffle ? 1 : 0);
  write_number(archive, "seed", state_->seed);
  write_number(archive, "drop_last", state_->drop_last ? 1 : 0);
  write_number(archive, "mode", static_cast<std::uint64_t>(state_->mode));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto same = [&](const char* key, std::uint64_t here) {
    const std::uint64_t there = read_number(archive, key);
    MANIPLE_REQUIRE(there == here,
                    "DistributedSampler: saved with {} = {}, but here it is {}; the position would mean other samples",
                    key, there, here);
  };
  same("dataset_size", state_->size);
  same("num_replicas", state_->ranks);
  same("rank", state_->rank);
  same("shuffle", state_->shuffle ? 1 : 0);
  same("seed", state_->seed);
  same("drop_last", state_->drop_last ? 1 : 0);
  same("mode", static_cast<std::uint64_t>(state_->mode));
  seek({static_cast<std::size_t>(read_number(archive, "epoch")),
        static_cast<std::size_t>(read_number(archive, "position"))});
}

}  // namespace maniple
