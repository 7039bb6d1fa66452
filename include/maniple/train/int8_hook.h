// Gradients that travel as 8-bit integers.
//
//   auto state = std::make_shared<maniple::Int8State>();
//   ddp.register_comm_hook(maniple::int8_quantize_hook(state));
//
// A bucket is cut into blocks of `block_size` numbers. A block travels as one float32, its *scale*, which is the
// largest magnitude in it divided by 127, and a byte for each number: x becomes round(x / scale). Bytes cannot be added
// without overflow, so the average is made of two exchanges. Each rank owns a part of the blocks: it receives that part
// from all (all_to_all), adds the numbers up in float32 in the order of ranks, divides, quantizes the average anew, and
// all collect the averages of all parts (all_gather). Every rank decodes the same bytes, so all have the same bits.
//
// Bytes: (1 + 4 / block_size) for each number and exchange, against 4 for float32: a quarter. Both exchanges run in
// backward's thread, whatever `overlap` says. It pays between hosts; within a host the arithmetic costs more than it
// saves.
//
// Error: for each number at most (mean over ranks of the block's largest magnitude + the largest magnitude of the
// block's average) / 254. With error feedback what was left out is added to the next gradient, so that it does not add
// up over steps.
//
// NaN and infinity: a block that holds one on any rank is NaN, wholly, on all ranks, so an overflow is seen and not
// hidden; its error is set to zero. Blocks whose magnitudes are all below 1.5e-36 count as zeros.
//
// float64 gradients are rounded to float32 first (those beyond its range count as infinite); float16 and bfloat16 are
// quantized from float32. Complex ones are averaged as they are. With one rank the gradient is quantized all the same.
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
  /// Numbers that share a scale. Smaller: more exact, more bytes. At least 1.
  std::int64_t block_size = 256;
  bool use_error_feedback = false;
};

class Int8State {
 public:
  explicit Int8State(Int8Options options = {});  ///< throws InvalidArgument naming the option
  ~Int8State();

  const Int8Options& options() const noexcept;
  HookTraffic traffic() const noexcept;

  /// As those of PowerSGDState: only errors are remembered, "error/fc1.weight".
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
