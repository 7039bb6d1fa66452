// One collective call, as backends and algorithms receive it.
//
// The buffers of each operation (P = parts of all ranks, in rank order; own = this rank's part; one = `count`
// elements):
//
//   op              in            out
//   broadcast       = out         one
//   reduce          one           one on the root
//   all_reduce      one           one
//   gather          own           P on the root
//   all_gather      own           P
//   scatter         P on the root own
//   reduce_scatter  P             own
//   all_to_all      P (in_parts)  P (out_parts)
//   barrier         -             -
//
// In place means: in == out for reduce and all_reduce; in is this rank's part of out for gather and all_gather; out is
// this rank's part of in for scatter and reduce_scatter. Otherwise the buffers do not overlap (comm/group/validate.h
// rejects all other overlaps).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <maniple/comm/source_location.h>
#include <maniple/comm/types.h>

namespace maniple {

/// A buffer cut into one part per rank: equal parts, or parts of the given counts (elements).
class Parts {
 public:
  Parts() = default;
  Parts(std::size_t each, int ranks) : each_(each), ranks_(ranks) {}
  /// `counts` is copied.
  explicit Parts(std::span<const std::size_t> counts)
      : ranks_(static_cast<int>(counts.size())), offsets_(counts.size() + 1) {
    for (std::size_t i = 0; i < counts.size(); ++i) offsets_[i + 1] = offsets_[i] + counts[i];
  }

  std::size_t count(int rank) const noexcept { return offsets_.empty() ? each_ : offsets_[rank + 1] - offsets_[rank]; }
  std::size_t offset(int rank) const noexcept { return offsets_.empty() ? each_ * rank : offsets_[rank]; }
  std::size_t total() const noexcept { return offsets_.empty() ? each_ * ranks_ : offsets_.back(); }
  std::size_t largest() const noexcept {
    std::size_t most = each_;
    for (std::size_t i = 1; i < offsets_.size(); ++i) most = std::max(most, offsets_[i] - offsets_[i - 1]);
    return most;
  }
  bool equal() const noexcept { return offsets_.empty(); }
  int ranks() const noexcept { return offsets_.empty() ? ranks_ : static_cast<int>(offsets_.size()) - 1; }
  /// A hash of the counts; 0 for equal parts.
  std::uint64_t hash() const noexcept {
    if (offsets_.empty()) return 0;
    std::uint64_t value =
        0xcbf29ce484222325ULL;  // FNV-1a over words: order matters, cheap, good enough to tell lists apart
    for (const std::size_t offset : offsets_) {
      value = (value ^ offset) * 0x100000001b3ULL;
      value ^= value >> 29;
    }
    return value | 1;
  }

 private:
  std::size_t each_ = 0;
  int ranks_ = 0;
  std::vector<std::size_t> offsets_;  // ranks + 1; empty for equal parts
};

struct Operation {
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce;
  int root = 0;
  std::size_t count = 0;  ///< elements: see the table; with parts, the size of equal parts (0 if uneven)
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  Parts parts;             ///< gather, all_gather, scatter, reduce_scatter
  Parts in_parts;          ///< all_to_all
  Parts out_parts;         ///< all_to_all
  std::uint64_t seq = 0;   ///< number of the call in its group
  Device device;           ///< device of in and out
  void* stream = nullptr;  ///< on a device: the stream that orders the operation (a cudaStream_t)
  SourceLocation where;

  // For an operation that is one stage of a larger one: only the first stage multiplies (premul_sum), only the last
  // divides (avg).
  bool first_stage = true;
  bool last_stage = true;
  int ranks = 0;  ///< ranks in the larger operation, for avg; 0: the ranks of this stage

  std::size_t element() const noexcept { return size_of(dtype); }
  std::size_t bytes() const noexcept { return count * element(); }
};

}  // namespace maniple
