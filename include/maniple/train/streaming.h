// Datasets of many files (shards) that are read from beginning to end: tars and CSV files that are larger than memory.
//
//   auto decode = [](maniple::RawSample& raw) {
//     return torch::data::Example<>(picture_of(raw.files.at("jpg")), torch::tensor(std::stol(raw.files.at("cls"))));
//   };
//   auto data = maniple::tar_stream("data/train-*.tar", decode, {.shuffle_buffer = 1000, .seed = 7});
//   maniple::DataLoader loader(data, {.batch_size = 32, .workers = 4});
//
// Who reads what. In each epoch the shards are put in an order, shuffled by seed and epoch, the same on all ranks. With
// S shards and R ranks the first S - S mod R of them belong to one rank each: rank r has places r, r + R, r + 2R, ...
// The other S mod R shards (all, when there are fewer shards than ranks) are read by all ranks, and rank r takes
// samples r, r + R, ... of them: so nobody is left without samples, and the ranks share those evenly. Every sample is
// seen exactly once. At best there are many more shards than ranks, of equal size. The number of a loader's workers
// plays no part: one thread of a rank reads, the workers decode.
//
// Shuffling. `shuffle_buffer` samples, undecoded, are held in memory; each that is handed out is drawn from them and
// replaced by the next one read. Which ones are drawn depends on seed, epoch and rank alone.
//
// Ends. Ranks may have different numbers of samples. For training either
//   - give `samples_per_shard` (count_samples() of shards.h makes it, once) and `equal`: all ranks then stop together,
//     at the number of the rank with the fewest; nothing is communicated for that;
//   - or train inside with_uneven_inputs (uneven_inputs.h): every sample is used, and ranks that have run out wait for
//     the others.
// For evaluation neither is needed: add up, and all_reduce the sums after the loop.
//
// Going on in the middle of an epoch. A loader's cursor says how many samples each rank has taken. The order is made
// anew from the seed, what was taken is passed over without being read (in a tar that is not compressed: header by
// header; with samples_per_shard: whole shards without opening them), and the buffer is filled with exactly what it
// held. The same samples follow in the same order, on the same number of ranks, which must not change within an epoch.
//
// Errors: those of shards.h, out of the loop, with the sample's name.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/sample_random.h>
#include <maniple/train/shards.h>

namespace MANIPLE_API maniple {

struct StreamOptions {
  bool shuffle_shards = true;                       ///< false: in the order of the list
  std::size_t shuffle_buffer = 0;                   ///< samples to draw from; 0: in the order of the files
  std::uint64_t seed = 0;                           ///< of both; the same on all ranks
  bool equal = false;                               ///< all ranks take equally many; needs samples_per_shard
  std::vector<std::size_t> samples_per_shard = {};  ///< of each shard, in the order of the list; empty: not known
  int num_replicas = 0;                             ///< how many ranks share the shards; 0: the size of `group`
  int rank = -1;                                    ///< this rank's place among them; -1: the rank in `group`
  /// Null: the default group if there is one, otherwise this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

namespace detail {

/// A list of shards, divided among ranks. Does not change, so copies of a stream share it.
class ShardSet {
 public:
  ShardSet(std::vector<std::string> paths, OpenShard open, StreamOptions options);

  /// What this rank reads in an epoch: shards of its own, then those that all ranks share.
  struct Part {
    std::vector<std::size_t> own;
    std::vector<std::size_t> shared;
  };
  Part part(std::size_t epoch) const;
  /// How many samples this rank takes in an epoch; the largest number there is when that is not known.
  std::size_t samples(std::size_t epoch) const;
  /// How many it would without `equal`.
  std::size_t available(std::size_t epoch) const;
  bool knows_samples() const noexcept { return !options.samples_per_shard.empty(); }

  std::vector<std::string> paths;
  OpenShard open;
  StreamOptions options;  ///< with rank and num_replicas filled in

 private:
  Part part_of(std::size_t rank, std::size_t epoch) const;
  std::size_t samples_of(std::size_t rank, std::size_t epoch) const;
};

}  // namespace detail

/// Shards, and a function that makes a sample of what lies in them.
template <class Sample>
class ShardStream {
 public:
  /// `decode` takes a RawSample&, or a RawSample& and a SampleRandom&. It is called by several threads at once.
  template <class Decode>
  ShardStream(std::vector<std::string> paths, OpenShard open, Decode decode, StreamOptions options = {})
      : set_(std::make_shared<detail::ShardSet>(std::move(paths), std::move(open), std::move(options))) {
    if constexpr (std::invocable<Decode&, RawSample&, SampleRandom&>) {
      decode_ = std::move(decode);
    } else {
      decode_ = [decode = std::move(decode)](RawSample& raw, SampleRandom&) mutable -> Sample { return decode(raw); };
    }
  }

  Sample decode(RawSample& raw, SampleRandom& random) const { return decode_(raw, random); }
  const std::shared_ptr<const detail::ShardSet>& shards() const noexcept { return set_; }

 private:
  std::shared_ptr<const detail::ShardSet> set_;
  std::function<Sample(RawSample&, SampleRandom&)> decode_;
};

namespace detail {
template <class Decode>
struct Decoded {
  using Type = std::invoke_result_t<Decode&, RawSample&>;
};
template <class Decode>
  requires std::invocable<Decode&, RawSample&, SampleRandom&>
struct Decoded<Decode> {
  using Type = std::invoke_result_t<Decode&, RawSample&, SampleRandom&>;
};
}  // namespace detail

/// The samples of tars, by the convention of WebDataset; see shards.h.
template <class Decode>
ShardStream<typename detail::Decoded<Decode>::Type> tar_stream(std::vector<std::string> paths, Decode decode,
                                                               StreamOptions options = {}) {
  return {std::move(paths), OpenShard(open_tar), std::move(decode), std::move(options)};
}
/// Those that fit a pattern.
template <class Decode>
ShardStream<typename detail::Decoded<Decode>::Type> tar_stream(const std::string& pattern, Decode decode,
                                                               StreamOptions options = {}) {
  return tar_stream(find_shards(pattern), std::move(decode), std::move(options));
}

}  // namespace maniple
