// Averages gradients that travel as 8-bit integers; the header describes the scheme. Cost for a bucket of N numbers on
// n ranks: an all_to_all and an all_gather of about N bytes, two passes of quantizing, and n + 2 passes of decoding a
// part or the whole. On a GPU the same is done by tensor operations, and the host does not wait.
#include <maniple/train/int8_hook.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "comm/base/check.h"
#include "train/ddp/hooks/hook_parts.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

/// Rounds to the nearest whole number, for magnitudes below 2^22. Unlike std::nearbyint, this is two additions on every
/// processor.
float rounded(float x) noexcept {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: leaves no bits for fractions
  return (x + kMagic) - kMagic;
}

float scale_of(std::span<const float> numbers) noexcept {
  float largest = 0;
  int bad = 0;
  for (const float x : numbers) {
    const float magnitude = std::fabs(x);
    bad |= magnitude <= FLT_MAX ? 0 : 1;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (bad != 0) return std::numeric_limits<float>::quiet_NaN();
  return largest < kSmallestBlock ? 0 : largest / 127;
}

}  // namespace

void quantize_blocks(std::span<const float> numbers, std::size_t block, std::span<std::uint8_t> coded) {
  const std::size_t blocks = blocks_of(numbers.size(), block);
  std::uint8_t* scales = coded.data();
  auto* bytes = reinterpret_cast<std::int8_t*>(coded.data() + 4 * blocks);
  for (std::size_t b = 0; b < blocks; ++b, bytes += block) {
    const auto own = numbers.subspan(b * block, std::min(block, numbers.size() - b * block));
    const float scale = scale_of(own);
    std::memcpy(scales + 4 * b, &scale, 4);
    if (!(scale > 0)) {
      std::memset(bytes, 0, block);
      continue;
    }
    const float inverse = 1 / scale;
    for (std::size_t i = 0; i < own.size(); ++i) {
      bytes[i] = static_cast<std::int8_t>(std::clamp(rounded(own[i] * inverse), -127.0f, 127.0f));
    }
    std::memset(bytes + own.size(), 0, block - own.size());
  }
}

void add_quantized(std::span<const std::uint8_t> coded, std::size_t block, std::span<float> numbers) {
  const std::size_t blocks = blocks_of(numbers.size(), block);
  const auto* bytes = reinterpret_cast<const std::int8_t*>(coded.data() + 4 * blocks);
  for (std::size_t b = 0; b < blocks; ++b, bytes += block) {
    float scale = 0;
    std::memcpy(&scale, coded.data() + 4 * b, 4);
    const auto own = numbers.subspan(b * block, std::min(block, numbers.size() - b * block));
    for (std::size_t i = 0; i < own.size(); ++i) own[i] += scale * static_cast<float>(bytes[i]);
  }
}

torch::Tensor quantized_rows(const torch::Tensor& numbers, std::int64_t block) {
  const std::int64_t blocks = (numbers.numel() + block - 1) / block;
  if (blocks == 0) return torch::empty({0}, numbers.options().dtype(torch::kUInt8));
  const torch::Tensor values =
      torch::constant_pad_nd(numbers, {0, blocks * block - numbers.numel()}).view({blocks, block});
  const torch::Tensor largest = values.abs().amax(1, true);  // NaN if the block contains one
  const torch::Tensor scales = (largest / 127).masked_fill_(largest < kSmallestBlock, 0);
  scales.masked_fill_(largest.le(FLT_MAX).logical_not_(), std::numeric_limits<float>::quiet_NaN());
  const torch::Tensor inverse = scales.reciprocal().masked_fill_(scales.gt(0).logical_not_(), 0);
  // A value that is not finite, times zero, is NaN; the scale marks such a block.
  const torch::Tensor whole = (values * inverse).round_().clamp_(-127, 127).nan_to_num_(0);
  const torch::Tensor rows = torch::empty({blocks, 4 + block}, values.options().dtype(torch::kUInt8));
  // A copy, because a reduction may leave any stride in the reduced dimension.
  rows.narrow(1, 0, 4).copy_(scales.clone(torch::MemoryFormat::Contiguous).view(torch::kUInt8));
  rows.narrow(1, 4, block).copy_(whole.to(torch::kInt8).view(torch::kUInt8));
  return rows.view({-1});
}

// All parts of a bucket are whole blocks, so the bucket's rows are the concatenated rows of the parts.
void add_quantized_rows(const torch::Tensor& coded, std::int64_t block, const torch::Tensor& numbers) {
  if (coded.numel() == 0) return;
  const torch::Tensor rows = coded.view({-1, 4 + block});
  // A copy, because rows may begin at addresses that are not aligned for floats.
  const torch::Tensor scales = rows.narrow(1, 0, 4).clone(torch::MemoryFormat::Contiguous).view(torch::kFloat32);
  const torch::Tensor values = rows.narrow(1, 4, block).view(torch::kInt8).to(torch::kFloat32).mul_(scales);
  numbers.add_(values.view({-1}).narrow(0, 0, numbers.numel()));
}

namespace {

std::span<float> numbers_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}
std::span<std::uint8_t> bytes_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<std::uint8_t>(), static_cast<std::size_t>(tensor.numel())};
}

/// Divides a bucket into the parts that each rank averages: whole blocks, in rank order.
struct Division {
  Division(std::size_t numbers, std::size_t block_size, int ranks) : total(numbers), block(block_size) {
    const std::size_t blocks = blocks_of(numbers, block), n = ranks;
    for (std::size_t r = 0; r < n; ++r) {
      const std::size_t from = blocks * r / n, to = blocks * (r + 1) / n;
      begin.push_back(std::min(total, from * block));
      length.push_back(std::min(total, to * block) - begin.back());
      bytes.push_back(coded_bytes(to - from, block));
      offset.push_back(all_bytes);
      all_bytes += bytes.back();
    }
  }
  template <class T>
  std::span<T> numbers(std::span<T> all, std::size_t r) const {
    return all.subspan(begin[r], length[r]);
  }
  std::span<std::uint8_t> coded(const torch::Tensor& all, std::size_t r) const {
    return bytes_of(all).subspan(offset[r], bytes[r]);
  }

  std::size_t total, block;
  std::vector<std::size_t> begin, length;  // in elements
  std::vector<std::size_t> bytes, offset;  // of the coded part
  std::size_t all_bytes = 0;
};

/// All parts of `numbers`, coded one after another.
torch::Tensor coded(const torch::Tensor& numbers, const Division& parts) {
  if (!numbers.is_cpu()) return quantized_rows(numbers, static_cast<std::int64_t>(parts.block));
  torch::Tensor result = torch::empty({static_cast<std::int64_t>(parts.all_bytes)}, torch::kUInt8);
  for (std::size_t r = 0; r < parts.bytes.size(); ++r) {
    quantize_blocks(parts.numbers(numbers_of(numbers), r), parts.block, parts.coded(result, r));
  }
  return result;
}

/// Adds the decoded numbers to `numbers`.
void add_coded(const torch::Tensor& coded, const Division& parts, const torch::Tensor& numbers) {
  if (!numbers.is_cpu()) {
    return add_quantized_rows(coded, static_cast<std::int64_t>(parts.block), numbers);
  }
  for (std::size_t r = 0; r < parts.bytes.size(); ++r) {
    add_quantized(parts.coded(coded, r), parts.block, parts.numbers(numbers_of(numbers), r));
  }
}

Buffer buffer_of_bytes(const torch::Tensor& bytes) {
  return {bytes.data_ptr(), static_cast<std::size_t>(bytes.numel()), DType::uint8,
          device_of(bytes, {"int8_quantize_hook", "coded gradient"})};
}

}  // namespace

struct Int8State::Impl {
  Int8Options options;
  HookTraffic traffic;
  ErrorFeedback errors;

  Work average(GradBucket& bucket, CommContext& comm);
};

Work Int8State::Impl::average(GradBucket& bucket, CommContext& comm) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& buffer = bucket.buffer();
  ProcessGroup& group = *comm.group();
  count_plain(traffic, buffer.nbytes(), group.size());
  if (!buffer.is_floating_point()) {
    count_all_reduce(traffic, buffer.nbytes(), group.size());
    return comm.all_reduce(buffer, ReduceOp::avg);
  }
  const torch::Tensor mine = buffer.to(torch::kFloat32, /*non_blocking=*/false, /*copy=*/true);
  if (options.use_error_feedback) mine.add_(errors.of(bucket, torch::kFloat32));

  const std::size_t me = group.rank(), n = group.size();
  const Division parts(mine.numel(), options.block_size, group.size());
  const Division part(parts.length[me], parts.block, 1);  // this rank's part
  const auto own_bytes = static_cast<std::int64_t>(parts.bytes[me]);
  const torch::Tensor out = coded(mine, parts);
  const torch::Tensor in = torch::empty({static_cast<std::int64_t>(n) * own_bytes}, out.options());
  const CallOptions call{.stream = current_stream_on(buffer_of_bytes(out).device)};
  const SourceLocation place = public_place();
  group.all_to_all(buffer_of_bytes(out), buffer_of_bytes(in), parts.bytes, std::vector<std::size_t>(n, parts.bytes[me]),
                   call, place);

  const torch::Tensor own = torch::zeros({static_cast<std::int64_t>(parts.length[me])}, mine.options());
  for (std::size_t r = 0; r < n; ++r) {
    add_coded(in.narrow(0, static_cast<std::int64_t>(r) * own_bytes, own_bytes), part, own);
  }
  own.div_(static_cast<double>(n));

  const torch::Tensor sent = coded(own, part), averages = torch::empty_like(out);
  group.all_gather(buffer_of_bytes(sent), buffer_of_bytes(averages), parts.bytes, call, place);
  traffic.sent_bytes += parts.all_bytes - parts.bytes[me] + (n - 1) * parts.bytes[me];

  const torch::Tensor result = torch::zeros_like(mine);
  add_coded(averages, parts, result);
  if (options.use_error_feedback) {
    // The error of the first coding of this rank's gradient, plus the error of the second coding of its part's average.
    // The latter is multiplied by n, since it will be divided by n.
    torch::Tensor& error = errors.of(bucket, torch::kFloat32);
    const torch::Tensor seen = torch::zeros_like(mine);
    add_coded(out, parts, seen);
    error.copy_(mine).sub_(seen);
    const auto begin = static_cast<std::int64_t>(parts.begin[me]);
    error.narrow(0, begin, own.numel()).add_(own.sub_(result.narrow(0, begin, own.numel())), static_cast<double>(n));
    error.masked_fill_(torch::isfinite(error).logical_not_(), 0);
  }
  // Not the whole buffer: zeros between gradients must not become NaN because of the block that contains them.
  std::vector<torch::Tensor> averaged;
  for (std::size_t i = 0; i < bucket.gradients().size(); ++i) averaged.push_back(part_of(result, bucket, i));
  copy_all(bucket.gradients(), averaged);
  return {};
}

Int8State::Int8State(Int8Options options) : impl_(std::make_unique<Impl>()) {
  MANIPLE_REQUIRE(options.block_size >= 1, "Int8State: block_size is {}; it must be at least 1", options.block_size);
  impl_->options = options;
}
Int8State::~Int8State() = default;

const Int8Options& Int8State::options() const noexcept { return impl_->options; }
HookTraffic Int8State::traffic() const noexcept { return impl_->traffic; }
void Int8State::average_errors(ProcessGroup& group) { impl_->errors.average(group); }

std::map<std::string, torch::Tensor> Int8State::state_dict() const {
  std::map<std::string, torch::Tensor> state;
  for (auto& [name, tensor] : impl_->errors.copies()) state[std::string(ErrorFeedback::kPrefix) + name] = tensor;
  return state;
}

void Int8State::load_state_dict(const std::map<std::string, torch::Tensor>& state) {
  ErrorFeedback::Named errors;
  for (const auto& [name, tensor] : state) {
    MANIPLE_REQUIRE(tensor.defined() && name.starts_with(ErrorFeedback::kPrefix),
                    "Int8State: entry {} is not an error/...; this is another state", name);
    errors[name.substr(ErrorFeedback::kPrefix.size())] = tensor.clone();
  }
  impl_->errors.load(std::move(errors));
}

CommHook int8_quantize_hook(std::shared_ptr<Int8State> state) {
  MANIPLE_REQUIRE(state != nullptr, "int8_quantize_hook: the state is null");
  return
      [state = std::move(state)](GradBucket& bucket, CommContext& comm) { return state->impl_->average(bucket, comm); };
}

}  // namespace maniple
