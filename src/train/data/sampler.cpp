#include <maniple/train/sampler.h>

#include <torch/torch.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/elastic.h"
#include "train/data/cursor_text.h"
#include "train/data/split_mix.h"
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
    group->require_member("DistributedSampler");
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

VirtualRanks VirtualRanks::of(int total, int rank, int ranks) {
  MANIPLE_REQUIRE(total >= 1, "{} virtual ranks; expected at least 1", total);
  MANIPLE_REQUIRE(ranks >= 1 && rank >= 0 && rank < ranks, "virtual ranks for rank {} of {}; expected 0 to {}", rank,
                  ranks, ranks - 1);
  MANIPLE_REQUIRE(ranks <= total,
                  "{} ranks for {} virtual ranks: some would have nothing to compute; start at most {} ranks, or take "
                  "more virtual ranks",
                  ranks, total, total);
  const int whole = total / ranks, more = total % ranks;
  return {total, rank * whole + std::min(rank, more), whole + (rank < more ? 1 : 0)};
}

struct DistributedSampler::State {
  std::size_t size;
  std::size_t ranks;  ///< or virtual ranks
  std::size_t rank;   ///< the first of them here
  bool shuffle;
  std::uint64_t seed;
  bool drop_last;
  SamplerMode mode;
  bool follows_group;    ///< ranks and rank were not given
  std::size_t here = 1;  ///< how many of them this rank has

  /// A batch that was handed out.
  struct Batch {
    std::size_t samples;
    std::size_t ends_turn;  ///< samples of each replica in the turn that ends with this batch; 0: it ends none
  };

  // The current or next pass.
  std::size_t epoch = 0;
  std::size_t start = 0;         ///< the place at which the pass begins: 0, or the argument of seek()
  std::size_t position = 0;      ///< samples of each replica in the turns handed out; may exceed size_of()
  std::size_t turn = 0;          ///< the replica, counted from `rank`, that gets the next batch
  std::size_t turn_samples = 0;  ///< the size of the batches of this turn
  std::size_t handed_out = 0;    ///< samples of all replicas here
  std::size_t done = 0;          ///< samples that the loop has counted
  std::size_t done_each = 0;     ///< samples of each replica in the turns that the loop has counted
  std::deque<Batch> ahead = {};  ///< batches handed out but not counted
  bool stays = false;            ///< the next reset keeps `start`
  bool drained = false;          ///< next() had nothing more to hand out
  bool looping = false;          ///< a loop over counting() is in progress
  bool ended = false;            ///< that loop has ended
  bool counts = false;           ///< whether the loop counts at all
  bool warned = false;           ///< of an epoch in the same order as the previous one
  std::vector<std::uint32_t> narrow =
      {};  ///< this rank's indices if they fit; both are empty before prepare() and without shuffling
  std::vector<std::uint64_t> wide = {};

  /// Samples of the replica at `offset` from `rank`. A replica never has more than those before it.
  std::size_t size_of(std::size_t offset) const {
    const std::size_t whole = (size - start) / ranks;
    const std::size_t rest = (size - start) % ranks;
    if (mode == SamplerMode::evaluation) return whole + (rank + offset < rest ? 1 : 0);
    return whole + (rest != 0 && !drop_last ? 1 : 0);
  }
  std::size_t local_size() const {
    std::size_t all = 0;
    for (std::size_t offset = 0; offset < here; ++offset) all += size_of(offset);
    return all;
  }

  /// The place in the order of the i-th sample of the replica at `offset`. Past the end, the order begins again.
  std::size_t place(std::size_t offset, std::size_t i) const { return (start + rank + offset + i * ranks) % size; }

  /// The samples of all replicas here, replica by replica.
  template <class Index>
  std::vector<Index> own_part() const {
    const auto order = random_order<Index>(size, mixed(seed + SplitMix::kStep * (epoch + 1)));
    std::vector<Index> part;
    part.reserve(local_size());
    for (std::size_t offset = 0; offset < here; ++offset) {
      for (std::size_t i = 0; i < size_of(offset); ++i) part.push_back(order[place(offset, i)]);
    }
    return part;
  }

  /// Shuffles if this has not been done for this epoch.
  void prepare() {
    if (!shuffle || !narrow.empty() || !wide.empty() || local_size() == 0) return;
    if (size - 1 <= std::numeric_limits<std::uint32_t>::max()) {
      narrow = own_part<std::uint32_t>();
    } else {
      wide = own_part<std::uint64_t>();
    }
  }

  void begin_at(std::size_t new_epoch, std::size_t place) {
    if (new_epoch != epoch || place != start) forget_order();
    epoch = new_epoch;
    start = place;
    position = turn = turn_samples = handed_out = done = done_each = 0;
    ahead.clear();
    drained = looping = ended = false;
  }

  /// Whether the pass, and with it the epoch, is over. A loop over counting() reports its own end, because its loader
  /// reads ahead and may drop the last, smaller batch.
  bool over() const { return ended || (drained && ahead.empty() && !looping); }

  /// Called before a pass begins. Warns if the previous pass was over and no new epoch was set.
  void warn_if_repeated() {
    const bool trains = shuffle && mode == SamplerMode::training && size > 1;
    if (!trains || !(drained || ended) || stays || std::exchange(warned, true) || rank != 0) return;
    log_warning(
        "DistributedSampler: epoch {} begins again, with its samples in the same order; call set_epoch(epoch) before "
        "each "
        "pass (or set shuffle = false, if the order is meant to stay)",
        epoch);
  }

  void forget_order() {
    narrow = {};
    wide = {};
  }

  /// The i-th sample of the replica at `offset`.
  std::size_t index(std::size_t offset, std::size_t i) const {
    if (narrow.empty() && wide.empty()) return place(offset, i);
    // Replicas with one sample more come first.
    const std::size_t more = size_of(offset) < size_of(0) ? (size - start) % ranks - rank : 0;
    const std::size_t begin = offset * size_of(offset) + more;
    return !narrow.empty() ? narrow[begin + i] : wide[begin + i];
  }
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
                                         .mode = options.mode,
                                         .follows_group = options.num_replicas == 0 && options.rank == -1});
}

void DistributedSampler::set_epoch(std::size_t epoch) {
  if (epoch == state_->epoch) return;  // after seek(), the usual call at the beginning of the loop changes nothing
  state_->begin_at(epoch, 0);
  state_->stays = false;
}

std::size_t DistributedSampler::epoch() const noexcept { return state_->epoch; }
std::size_t DistributedSampler::local_size() const noexcept { return state_->local_size(); }
std::size_t DistributedSampler::dataset_size() const noexcept { return state_->size; }
int DistributedSampler::num_replicas() const noexcept { return static_cast<int>(state_->ranks); }
int DistributedSampler::rank() const noexcept { return static_cast<int>(state_->rank); }

std::size_t DistributedSampler::local_batches(std::size_t batch_size, bool drop_smaller) const {
  MANIPLE_REQUIRE(batch_size > 0, "DistributedSampler: a batch size of 0");
  std::size_t batches = 0;
  for (std::size_t offset = 0; offset < state_->here; ++offset) {
    const std::size_t samples = state_->size_of(offset);
    batches += samples / batch_size + (samples % batch_size != 0 && !drop_smaller ? 1 : 0);
  }
  return batches;
}

std::vector<std::size_t> DistributedSampler::indices() const {
  state_->prepare();
  std::vector<std::size_t> result;
  for (std::size_t offset = 0; offset < state_->here; ++offset) {
    for (std::size_t i = 0; i < state_->size_of(offset); ++i) result.push_back(state_->index(offset, i));
  }
  return result;
}

void DistributedSampler::divide(const VirtualRanks& ranks) {
  State& state = *state_;
  const VirtualRanks now{static_cast<int>(state.ranks), static_cast<int>(state.rank), static_cast<int>(state.here)};
  if (now == ranks) return;
  // In an elastic job the number of ranks changes.
  const bool follows = state.follows_group && is_elastic();
  MANIPLE_REQUIRE(
      follows || (state.here == 1 && now.first < now.total && now.total <= ranks.total &&
                  VirtualRanks::of(ranks.total, now.first, now.total) == ranks),
      "DistributedSampler: rank {} of {} cannot take the virtual ranks {} to {} of {}: they belong to "
      "another rank, or to another number of ranks; leave num_replicas and rank unset, or set them as the training "
      "group has them",
      now.first, now.total, ranks.first, ranks.first + ranks.count - 1, ranks.total);
  state.ranks = ranks.total;
  state.rank = ranks.first;
  state.here = ranks.count;
  state.begin_at(state.epoch, state.stays ? state.start : 0);
  state.forget_order();
}

void DistributedSampler::reset(OptionalSize new_size) {
  state_->warn_if_repeated();
  if (new_size && *new_size != state_->size) {
    state_->size = *new_size;
    state_->stays = false;
    state_->forget_order();
  }
  state_->begin_at(state_->epoch, state_->stays ? state_->start : 0);
  state_->stays = false;
}

DistributedSampler::OptionalBatch DistributedSampler::next(std::size_t batch_size) {
  MANIPLE_REQUIRE(batch_size > 0, "DistributedSampler: a batch size of 0");
  State& state = *state_;
  if (state.turn == 0) state.turn_samples = batch_size;
  MANIPLE_REQUIRE(
      batch_size == state.turn_samples,
      "DistributedSampler: a batch of {} samples, and virtual rank {} got {} in this turn; the virtual ranks "
      "of a turn get batches of the same size",
      batch_size, state.rank + state.turn - 1, state.turn_samples);
  const std::size_t all = state.size_of(state.turn);
  const std::size_t count = std::min(batch_size, all - std::min(all, state.position));
  state.drained = count == 0;
  if (count == 0) return {};
  state.prepare();
  std::vector<std::size_t> batch(count);
  std::size_t position = state.position;
  for (std::size_t& index : batch) index = state.index(state.turn, position++);
  state.handed_out += count;
  const bool ends_turn = ++state.turn == state.here;
  state.ahead.push_back({count, ends_turn ? count : 0});
  if (ends_turn) {
    state.turn = 0;
    state.position += batch_size;
  }
  return batch;
}

// ---- Where training is ---------------------------------------------------------------------------------------------

void DistributedSampler::batch_done() {
  MANIPLE_REQUIRE(
      !state_->ahead.empty(),
      "DistributedSampler: a batch is counted as done, but all {} samples that were handed out in this pass "
      "are counted already; is it counted twice, or does the loader have another sampler?",
      state_->done);
  state_->done += state_->ahead.front().samples;
  state_->done_each += state_->ahead.front().ends_turn;
  state_->ahead.pop_front();
  state_->counts = true;
}

void DistributedSampler::loop_began() { state_->looping = true; }
void DistributedSampler::loop_ended() { state_->ended = true; }

DistributedSampler::Cursor DistributedSampler::cursor() const {
  const State& state = *state_;
  if (state.over()) return {state.epoch + 1, 0};
  MANIPLE_REQUIRE(state.counts || state.handed_out == 0,
                  "DistributedSampler: {} samples were handed out, but no batch was counted as done, so there is no "
                  "cursor; write the loop as `for (auto& batch : sampler.counting(*loader))`, or call batch_done() "
                  "after each batch",
                  state.handed_out);
  // A rank that has finished its part has reached the end: the rest of the epoch is dropped or belongs to other ranks.
  const std::size_t all = local_size();
  if (all > 0 && state.done == all) return {state.epoch, state.size};
  return {state.epoch, state.start + state.done_each * state.ranks};
}

void DistributedSampler::seek(Cursor cursor) {
  MANIPLE_REQUIRE(cursor.places <= state_->size,
                  "DistributedSampler: place {} is behind the end of an epoch of {} samples", cursor.places,
                  state_->size);
  state_->begin_at(cursor.epoch, cursor.places);
  state_->stays = true;
}

std::string DistributedSampler::cursor_text() const {
  const Cursor now = cursor();
  return write_cursor({.epoch = now.epoch,
                       .places = now.places,
                       .size = state_->size,
                       .shuffle = state_->shuffle,
                       .seed = state_->seed});
}

void DistributedSampler::load_cursor(const std::string& text) {
  const auto saved = read_cursor(text);
  MANIPLE_REQUIRE(saved, "DistributedSampler: \"{}\" is not a cursor; expected {}", text.substr(0, 80), kCursorForm);
  const auto same = [](const char* what, std::uint64_t there, std::uint64_t here) {
    MANIPLE_REQUIRE(
        there == here,
        "DistributedSampler: the cursor was saved with {} {}, but here it is {}; its place would mean other "
        "samples (to begin the epoch anew, leave the sampler out of the checkpoint)",
        what, there, here);
  };
  same("a dataset of size", saved->size, state_->size);
  same("shuffle", saved->shuffle ? 1 : 0, state_->shuffle ? 1 : 0);
  if (state_->shuffle) same("seed", saved->seed, state_->seed);
  seek({static_cast<std::size_t>(saved->epoch), static_cast<std::size_t>(saved->places)});
}

namespace {
constexpr const char* kArchiveKey = "distributed_sampler";
}  // namespace

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write(kArchiveKey, c10::IValue(cursor_text()));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue text;
  MANIPLE_REQUIRE(
      archive.try_read(kArchiveKey, text) && text.isString(),
      "DistributedSampler: the archive holds no \"{}\"; it was not written by save() of a DistributedSampler",
      kArchiveKey);
  load_cursor(text.toStringRef());
}

std::size_t per_process_batch_size(std::size_t global_batch, int world_size) {
  MANIPLE_REQUIRE(world_size > 0, "per_process_batch_size: world_size is {}; expected 1 or more", world_size);
  const std::size_t ranks = world_size;
  MANIPLE_REQUIRE(global_batch > 0, "per_process_batch_size: a batch of 0");
  const std::size_t above = (global_batch / ranks + 1) * ranks;
  MANIPLE_REQUIRE(global_batch >= ranks,
                  "per_process_batch_size: a batch of {} leaves some of {} processes without a sample; take {} or more",
                  global_batch, ranks, ranks);
  MANIPLE_REQUIRE(global_batch % ranks == 0,
                  "per_process_batch_size: a batch of {} is not a multiple of {} processes; take {} or {}",
                  global_batch, ranks, above - ranks, above);
  return global_batch / ranks;
}

std::size_t per_process_workers(std::size_t total_workers, int world_size) {
  MANIPLE_REQUIRE(world_size > 0, "per_process_workers: world_size is {}; expected 1 or more", world_size);
  const std::size_t ranks = world_size;
  return total_workers / ranks + (total_workers % ranks != 0 ? 1 : 0);
}

}  // namespace maniple
