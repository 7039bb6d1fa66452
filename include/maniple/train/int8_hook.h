// A communication hook that sends gradients as 8-bit integers.
//
//   auto state = std::make_shared<maniple::Int8State>();
//   ddp.register_comm_hook(maniple::int8_quantize_hook(state));
//
// A bucket is cut into blocks of `block_size` numbers. A block is sent as one float32, its *scale* (the block's largest
// magnitude divided by 127), and one byte per number: x becomes round(x / scale). Bytes cannot be summed without
// overflow, so averaging takes two exchanges. Each rank owns some of the blocks. It receives these blocks from all
// ranks (all_to_all), sums them in float32 in rank order, divides, and quantizes the average. Then all ranks collect
// the averages (all_gather). Every rank decodes the same bytes, so the results are bit for bit equal.
//
// Bytes. Each exchange moves (1 + 4 / block_size) bytes per number instead of 4 for float32: a quarter. Both exchanges
// run in the thread of backward, whatever `overlap` is set to. Useful between hosts; within a host the arithmetic costs
// more than it saves.
//
// Error. Per number at most (mean over ranks of the block's largest magnitude + the largest magnitude of the block's
// average) / 254. With error feedback, the error is added to the next gradient, so that it does not accumulate over
// steps.
//
// NaN and infinity. If a block contains one on any rank, the whole block becomes NaN on all ranks, so overflows stay
// visible, and its stored error is set to zero. Blocks with all magnitudes below 1.5e-36 count as zeros.
//
// Dtypes. float64 gradients are first rounded to float32 (values beyond its range count as infinite). float16 and
// bfloat16 are quantized from float32. Complex gradients are averaged without compression. A single rank quantizes its
// gradient, too.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/comm_hooks.h>

namespace MANIPLE_API maniple {

struct Int8Options {
  /// Numbers that share a scale; at least 1. Smaller blocks are more exact and send more bytes.
  std::int64_t block_size = 256;
  bool use_error_feedback = false;
};

class Int8State {
 public:
  explicit Int8State(Int8Options options = {});  ///< throws InvalidArgument, which names the option
  ~Int8State();

  const Int8Options& options() const noexcept;
  HookTraffic traffic() const noexcept;

  /// As in PowerSGDState, but only errors are stored: "error/fc1.weight".
  void average_errors(ProcessGroup& group);
  std::map<std::string, torch::Tensor> state_dict() const;
  void load_state_dict(const std::map<std::string, torch::Tensor>& state);

 private:
  friend CommHook int8_quantize_hook(std::shared_ptr<Int8State> state);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

CommHook int8_quantize_hook(std::shared_ptr<Int8State> state);

}  // namespace maniple
