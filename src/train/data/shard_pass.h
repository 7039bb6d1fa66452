// One rank's way through the shards of an epoch: which samples, in which order; see streaming.h. No LibTorch.
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
  /// Begins behind the first `start` samples that this rank takes. Opens nothing yet.
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
  std::size_t limit_;      ///< how many samples this rank takes in the epoch; kUnknown
  std::size_t available_;  ///< how many its shards have; kUnknown
  detail::ShardSet::Part part_;

  // Where reading is.
  std::size_t shard_ = 0;          ///< among own and shared ones
  std::size_t in_shard_ = 0;       ///< samples of it that are passed
  std::size_t shared_passed_ = 0;  ///< samples of shared shards that are passed, of all of them
  std::unique_ptr<ShardReader> reader_;

  // The shuffle buffer.
  bool filled_ = false;
  SplitMix random_{0};
  std::vector<RawSample> buffer_;
  std::optional<std::size_t> empty_slot_;  ///< the one drawn last, to be filled with the next sample
  std::size_t taken_ = 0;
};

}  // namespace maniple
