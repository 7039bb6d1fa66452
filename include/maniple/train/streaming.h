// Datasets larger than memory, read sequentially from many files (shards): tars and CSV files.
//
//   auto decode = [](maniple::RawSample& raw) {
//     return torch::data::Example<>(picture_of(raw.files.at("jpg")), torch::tensor(std::stol(raw.files.at("cls"))));
//   };
//   auto data = maniple::tar_stream("data/train-*.tar", decode, {.shuffle_buffer = 1000, .seed = 7});
//   maniple::DataLoader loader(data, {.batch_size = 32, .workers = 4});
//
// Division. In each epoch the shards are put in an order, shuffled by seed and epoch, that is the same on all ranks.
// With S shards and R ranks, the first S - S mod R shards belong to one rank each: rank r takes places r, r + R, and so
// on. The other S mod R shards (all shards, if there are fewer than ranks) are read by all ranks, and rank r takes
// their samples r, r + R, and so on. So every rank has samples, and every sample is used exactly once. The best
// division is many more shards than ranks, of equal size. The number of loader workers does not matter: one thread per
// rank reads, the workers decode.
//
// Shuffling. `shuffle_buffer` samples, undecoded, are held in memory. Each returned sample is drawn from this buffer
// and replaced by the next one read. The draws depend on seed, epoch and rank alone.
//
// End of an epoch. Ranks may have different numbers of samples. For training, either
// - set `samples_per_shard` (count it once with count_samples() of shard_reader.h) and `equal`: all ranks then stop
// together,
//   after the number of samples of the rank with the fewest, without communication;
// - or train inside with_uneven_inputs (uneven_inputs.h): every sample is used, and ranks that have run out wait for
//   the others.
// For evaluation neither is needed: accumulate locally, and all_reduce the sums after the loop.
//
// Resuming in the middle of an epoch. A loader's cursor records the number of samples that each rank has taken. After a
// restart the order is computed again from the seed. Samples already taken are skipped without being read (in an
// uncompressed tar: header by header; with samples_per_shard: whole shards without opening them), and the buffer is
// refilled with its exact previous contents. The same samples follow in the same order. The number of ranks must not
// change within an epoch.
//
// Errors: the errors of shard_reader.h, thrown by the loop, with the sample's name.
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
#include <maniple/train/shard_reader.h>

namespace MANIPLE_API maniple {

struct StreamOptions {
  bool shuffle_shards = true;      ///< false: in list order
  std::size_t shuffle_buffer = 0;  ///< number of samples to draw from; 0: in file order
  std::uint64_t seed = 0;          ///< seed of both shuffles; the same on all ranks
  bool equal = false;              ///< all ranks take the same number of samples; needs samples_per_shard
  std::vector<std::size_t> samples_per_shard = {};  ///< for each shard, in list order; empty: unknown
  int num_replicas = 0;                             ///< number of ranks that share the shards; 0: the size of `group`
  int rank = -1;                                    ///< this rank's index among them; -1: the rank in `group`
  /// Null: the default group; without one, this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

namespace detail {

/// A list of shards, divided among ranks. Immutable, so copies of a stream share it.
class ShardSet {
 public:
  ShardSet(std::vector<std::string> paths, OpenShard open, StreamOptions options);

  /// The shards that this rank reads in an epoch: its own, then the shards shared by all ranks.
  struct Part {
    std::vector<std::size_t> own;
    std::vector<std::size_t> shared;
  };
  Part part(std::size_t epoch) const;
  /// Number of samples that this rank takes in an epoch; the maximum of the type if unknown.
  std::size_t samples(std::size_t epoch) const;
  /// The same number without `equal`.
  std::size_t available(std::size_t epoch) const;
  bool knows_samples() const noexcept { return !options.samples_per_shard.empty(); }

  std::vector<std::string> paths;
  OpenShard open;
  StreamOptions options;  ///< with actual values of rank and num_replicas

 private:
  Part part_of(std::size_t rank, std::size_t epoch) const;
  std::size_t samples_of(std::size_t rank, std::size_t epoch) const;
};

}  // namespace detail

/// Shards, with a function that decodes their samples.
template <class Sample>
class ShardStream {
 public:
  /// `decode` takes a RawSample&, or a RawSample& and a SampleRandom&. Several threads call it at the same time.
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

/// The samples of tars in WebDataset's convention; see shard_reader.h.
template <class Decode>
ShardStream<typename detail::Decoded<Decode>::Type> tar_stream(std::vector<std::string> paths, Decode decode,
                                                               StreamOptions options = {}) {
  return {std::move(paths), OpenShard(open_tar), std::move(decode), std::move(options)};
}
/// The samples of all tars that match a shell pattern.
template <class Decode>
ShardStream<typename detail::Decoded<Decode>::Type> tar_stream(const std::string& pattern, Decode decode,
                                                               StreamOptions options = {}) {
  return tar_stream(find_shards(pattern), std::move(decode), std::move(options));
}

}  // namespace maniple
