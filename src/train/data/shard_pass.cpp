#include "train/data/shard_pass.h"

#include <glob.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/base/check.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

std::uint64_t seed_of_epoch(std::uint64_t seed, std::size_t epoch) {
  return mixed(seed + SplitMix::kStep * (epoch + 1));
}

/// The number of `samples` that rank `rank` takes if ranks 0 .. ranks-1 take samples in turn.
std::size_t turns(std::size_t samples, std::size_t rank, std::size_t ranks) {
  return samples / ranks + (rank < samples % ranks ? 1 : 0);
}

}  // namespace

std::vector<std::string> find_shards(const std::string& pattern) {
  glob_t found = {};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<std::string> paths;
  if (result == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  MANIPLE_REQUIRE(!paths.empty(), "find_shards: no file fits \"{}\"", pattern);
  std::sort(paths.begin(), paths.end());  // glob's order depends on the locale
  return paths;
}

std::vector<std::size_t> count_samples(const std::vector<std::string>& paths, const OpenShard& open) {
  std::vector<std::size_t> counts;
  for (const std::string& path : paths) {
    const auto reader = open(path);
    counts.push_back(0);
    while (reader->next(nullptr)) ++counts.back();
  }
  return counts;
}

namespace detail {

ShardSet::ShardSet(std::vector<std::string> paths_given, OpenShard open_given, StreamOptions options_given)
    : paths(std::move(paths_given)), open(std::move(open_given)), options(std::move(options_given)) {
  MANIPLE_REQUIRE(!paths.empty(), "ShardStream: the list of shards is empty");
  MANIPLE_REQUIRE(open != nullptr, "ShardStream: no function to open shards with");
  if (options.num_replicas == 0 || options.rank == -1) {
    const auto group = options.group ? options.group : is_initialized() ? get_default_group() : nullptr;
    if (group) group->require_member("ShardStream");
    if (options.num_replicas == 0) options.num_replicas = group ? group->size() : 1;
    if (options.rank == -1) options.rank = group ? group->rank() : 0;
  }
  options.group = nullptr;
  MANIPLE_REQUIRE(options.num_replicas > 0 && options.rank >= 0 && options.rank < options.num_replicas,
                  "ShardStream: rank {} of {} ranks; expected 0 to one less than their number", options.rank,
                  options.num_replicas);
  MANIPLE_REQUIRE(options.samples_per_shard.empty() || options.samples_per_shard.size() == paths.size(),
                  "ShardStream: samples_per_shard has {} numbers, but there are {} shards",
                  options.samples_per_shard.size(), paths.size());
  MANIPLE_REQUIRE(!options.equal || knows_samples(),
                  "ShardStream: equal needs samples_per_shard (count_samples() makes it); without it train inside "
                  "with_uneven_inputs");
}

ShardSet::Part ShardSet::part_of(std::size_t rank, std::size_t epoch) const {
  const std::size_t ranks = options.num_replicas;
  std::vector<std::size_t> order(paths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (options.shuffle_shards) order = random_order<std::size_t>(paths.size(), seed_of_epoch(options.seed, epoch));
  const std::size_t divided = order.size() - order.size() % ranks;
  Part part;
  for (std::size_t i = rank; i < divided; i += ranks) part.own.push_back(order[i]);
  part.shared.assign(order.begin() + static_cast<std::ptrdiff_t>(divided), order.end());
  return part;
}

std::size_t ShardSet::samples_of(std::size_t rank, std::size_t epoch) const {
  const Part part = part_of(rank, epoch);
  const auto sum = [&](const std::vector<std::size_t>& shards) {
    std::size_t all = 0;
    for (const std::size_t shard : shards) all += options.samples_per_shard[shard];
    return all;
  };
  return sum(part.own) + turns(sum(part.shared), rank, options.num_replicas);
}

ShardSet::Part ShardSet::part(std::size_t epoch) const { return part_of(options.rank, epoch); }

std::size_t ShardSet::available(std::size_t epoch) const {
  if (!knows_samples()) return std::numeric_limits<std::size_t>::max();
  return samples_of(options.rank, epoch);
}

std::size_t ShardSet::samples(std::size_t epoch) const {
  if (!options.equal) return available(epoch);
  std::size_t fewest = samples_of(0, epoch);
  for (int rank = 1; rank < options.num_replicas; ++rank) fewest = std::min(fewest, samples_of(rank, epoch));
  return fewest;
}

}  // namespace detail

ShardPass::ShardPass(std::shared_ptr<const detail::ShardSet> set, std::size_t epoch, std::size_t start)
    : set_(std::move(set)),
      epoch_(epoch),
      start_(start),
      limit_(set_->samples(epoch)),
      available_(set_->available(epoch)),
      part_(set_->part(epoch)) {}

void ShardPass::rewind() {
  shard_ = in_shard_ = shared_passed_ = 0;
  reader_ = nullptr;
}

void ShardPass::leave_shard() {
  reader_ = nullptr;
  ++shard_;
  in_shard_ = 0;
}

/// Reads the next sample of this rank, in file order.
bool ShardPass::read(RawSample* sample) {
  const std::size_t ranks = set_->options.num_replicas;
  const std::size_t rank = set_->options.rank;
  while (shard_ < part_.own.size() + part_.shared.size()) {
    const bool shared = shard_ >= part_.own.size();
    const std::size_t number = shared ? part_.shared[shard_ - part_.own.size()] : part_.own[shard_];
    if (reader_ == nullptr) reader_ = set_->open(set_->paths[number]);
    const bool mine = !shared || shared_passed_ % ranks == rank;
    const bool found = reader_->next(mine ? sample : nullptr);
    if (set_->knows_samples()) {
      const std::size_t expected = set_->options.samples_per_shard[number];
      MANIPLE_REQUIRE(found ? in_shard_ < expected : in_shard_ == expected,
                      "{}: holds {} samples, but samples_per_shard says {}; count_samples() counts them anew",
                      set_->paths[number], found ? format_text("more than {}", expected) : format_text("{}", in_shard_),
                      expected);
    }
    if (!found) {
      leave_shard();
      continue;
    }
    if (mine && sample != nullptr) {
      sample->shard_number = number;
      sample->number = in_shard_;
    }
    ++in_shard_;
    if (shared) ++shared_passed_;
    if (mine) return true;
  }
  return false;
}

/// Skips `samples` samples of this rank; false if there are fewer. Skips whole shards without opening them if their
/// sizes are known.
bool ShardPass::pass_over(std::size_t samples) {
  while (samples > 0) {
    if (set_->knows_samples() && reader_ == nullptr && shard_ < part_.own.size() + part_.shared.size()) {
      const bool shared = shard_ >= part_.own.size();
      const std::size_t all =
          set_->options.samples_per_shard[shared ? part_.shared[shard_ - part_.own.size()] : part_.own[shard_]];
      const std::size_t ranks = set_->options.num_replicas;
      const std::size_t rank = set_->options.rank;
      const std::size_t mine =
          shared ? turns(shared_passed_ + all, rank, ranks) - turns(shared_passed_, rank, ranks) : all;
      if (mine <= samples) {
        samples -= mine;
        if (shared) shared_passed_ += all;
        leave_shard();
        continue;
      }
    }
    if (!read(nullptr)) return false;
    --samples;
  }
  return true;
}

/// Fills the buffer with its contents after `start_` draws. Draws do not depend on the samples, so they are simulated
/// first, with sample numbers, and only the samples that remain are read.
void ShardPass::fill_buffer() {
  filled_ = true;
  while (!load_buffer()) {
  }
}

/// False if the samples ended earlier than expected; `available_` then has their number.
bool ShardPass::load_buffer() {
  const std::size_t rank = set_->options.rank;
  random_ = SplitMix(mixed(seed_of_epoch(set_->options.seed, epoch_) + SplitMix::kStep * (rank + 1)));
  std::vector<std::size_t> numbers(std::min(std::max<std::size_t>(set_->options.shuffle_buffer, 1), available_));
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  std::size_t behind = numbers.size();  // the number of the next sample to read
  const std::size_t start = std::min({start_, limit_, available_});
  for (taken_ = 0; taken_ < start; ++taken_) {
    std::size_t& drawn = numbers[random_.below(numbers.size())];
    if (behind < available_) {
      drawn = behind++;
    } else {
      drawn = numbers.back();
      numbers.pop_back();
    }
  }
  std::vector<std::size_t> slots(numbers.size());  // in the order in which their samples are read
  std::iota(slots.begin(), slots.end(), std::size_t{0});
  std::sort(slots.begin(), slots.end(), [&](std::size_t a, std::size_t b) { return numbers[a] < numbers[b]; });
  rewind();
  buffer_.assign(numbers.size(), {});
  std::size_t at = 0;
  for (const std::size_t slot : slots) {
    if (pass_over(numbers[slot] - at) && read(&buffer_[slot])) {
      at = numbers[slot] + 1;
    } else if (taken_ == 0) {  // there are fewer samples than slots
      buffer_.resize(slot);
      return true;
    } else {
      return count_available();
    }
  }
  return pass_over(behind - at) || count_available();
}

bool ShardPass::count_available() {
  MANIPLE_ASSERT(available_ == kUnknown);  // for given numbers, read() has already thrown
  rewind();
  for (available_ = 0; read(nullptr);) ++available_;
  return false;
}

bool ShardPass::next(RawSample& sample) {
  if (!filled_) fill_buffer();
  if (taken_ >= limit_) return false;
  if (const auto slot =
          std::exchange(empty_slot_, std::nullopt)) {  // filled late: an error must not come before its sample is due
    if (!read(&buffer_[*slot])) {
      std::swap(buffer_[*slot], buffer_.back());
      buffer_.pop_back();
    }
  }
  if (buffer_.empty()) return false;
  empty_slot_ = random_.below(buffer_.size());
  sample = std::move(buffer_[*empty_slot_]);
  ++taken_;
  return true;
}

}  // namespace maniple
