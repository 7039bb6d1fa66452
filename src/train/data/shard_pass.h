// One rank's pass over the shards of an epoch: which samples it reads, in which order; see streaming.h. Without
// LibTorch.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "train/data/split_mix.h"
#include <maniple/train/streaming.h>

namespace maniple {

class ShardPass {
 public:
  /// Begins after the first `start` samples of this rank. Opens nothing yet.
  ShardPass(std::shared_ptr<const detail::ShardSet> set, std::size_t epoch, std::size_t start);

  /// The next sample of this rank; false when there are no more.
  bool next(RawSample& sample);

 private:
  static constexpr std::size_t kUnknown = std::numeric_limits<std::size_t>::max();

  void rewind();
  void fill_buffer();
  bool load_buffer();
  bool read(RawSample* sample);
  bool count_available();
  bool pass_over(std::size_t samples);
  void leave_shard();

  std::shared_ptr<const detail::ShardSet> set_;
  std::size_t epoch_;
  std::size_t start_;
  std::size_t limit_;      ///< samples that this rank takes in the epoch; kUnknown
  std::size_t available_;  ///< samples in this rank's shards; kUnknown
  detail::ShardSet::Part part_;

  // The reading position.
  std::size_t shard_ = 0;          ///< index among own and shared shards
  std::size_t in_shard_ = 0;       ///< samples passed in the current shard
  std::size_t shared_passed_ = 0;  ///< samples passed in all shared shards, by all ranks
  std::unique_ptr<ShardReader> reader_;

  // The shuffle buffer.
  bool filled_ = false;
  SplitMix random_{0};
  std::vector<RawSample> buffer_;
  std::optional<std::size_t> empty_slot_;  ///< the slot drawn last, to be filled with the next sample
  std::size_t taken_ = 0;
};

}  // namespace maniple
