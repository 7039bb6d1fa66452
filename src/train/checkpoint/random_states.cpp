#include "train/checkpoint/random_states.h"

#include <cstring>

#include <ATen/CPUGeneratorImpl.h>

#include "comm/base/format.h"
#include "train/restored.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

std::string random_name(int rank) { return format_text("rank.{}", rank); }
std::string device_random_name(int rank) { return format_text("rank.{}.cuda", rank); }

/// The states of the GPUs that this rank sees, concatenated; empty if it sees none.
std::string device_states() {
  std::string states;
  for (const at::Generator& generator : device_generators()) {
    const torch::Tensor bytes = random_state(generator);
    states.append(static_cast<const char*>(bytes.data_ptr()), bytes.nbytes());
  }
  return states;
}

torch::Tensor bytes_of(const std::string& text) {
  const torch::Tensor bytes = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kUInt8);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

void add_device_states([[maybe_unused]] ProcessGroup* ranks, [[maybe_unused]] NamedState& state) {
#ifdef MANIPLE_TORCH_CUDA
  const std::string mine = device_states();
  const bool alone = ranks == nullptr || ranks->size() == 1;
  const std::vector<std::string> all = alone ? std::vector{mine} : ranks->all_gather_objects(mine, {}, public_place());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) state.tensors[device_random_name(static_cast<int>(r))] = bytes_of(all[r]);
  }
#endif
}

void set_device_states(const torch::Tensor& saved) {
  std::int64_t at = 0;
  for (const at::Generator& generator : device_generators()) {
    const std::int64_t bytes = random_state(generator).numel();
    if (at + bytes > saved.numel()) return;
    set_random_state(generator, saved.narrow(0, at, bytes).clone());
    at += bytes;
  }
}

}  // namespace

NamedState random_states(ProcessGroup* ranks) {
  NamedState state;
  const torch::Tensor mine = random_state(at::detail::getDefaultCPUGenerator());
  add_device_states(ranks, state);
  if (ranks == nullptr || ranks->size() == 1) {
    state.tensors[random_name(0)] = mine;
    return state;
  }
  const std::size_t bytes = mine.numel();
  const std::int64_t n = ranks->rank() == 0 ? ranks->size() : 0;
  const torch::Tensor all = torch::empty({n, mine.numel()}, torch::kUInt8);
  ranks->gather(ConstBuffer{mine.data_ptr(), bytes, DType::uint8}, Buffer{all.data_ptr(), bytes * n, DType::uint8}, 0,
                {}, {}, public_place());
  for (std::int64_t r = 0; r < n; ++r) state.tensors[random_name(static_cast<int>(r))] = all[r];
  return state;
}

PartState own_random_state(int rank) {
  PartState state;
  state.tensors.push_back({TensorShard::whole(random_name(rank), random_state(at::detail::getDefaultCPUGenerator()))});
  if (const std::string mine = device_states(); !mine.empty())
    state.tensors.push_back({TensorShard::whole(device_random_name(rank), bytes_of(mine))});
  return state;
}

void set_random_states(const SavedPart& saved, int rank) {
  const auto has = [&](const std::string& name) { return saved.tensors().count(name) != 0; };
  if (has(random_name(rank))) set_random_state(at::detail::getDefaultCPUGenerator(), saved.read(random_name(rank)));
  if (has(device_random_name(rank))) set_device_states(saved.read(device_random_name(rank)));
}

}  // namespace maniple
