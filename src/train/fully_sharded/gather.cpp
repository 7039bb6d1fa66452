// Gathering the parameters of a unit.
#include <cstring>

#include "base/check.h"
#include "train/fully_sharded/unit.h"

namespace maniple::detail {
namespace {

/// What comes before the rows of a rank: the number of its unit.
constexpr std::size_t kHeaderBytes = 64;

/// Bytes on a device of the scratch, or of a whole.
Tensor bytes_at(void* data, std::size_t bytes, torch::Device device) {
  return torch::from_blob(data, {static_cast<std::int64_t>(bytes)},
                          torch::TensorOptions().dtype(torch::kUInt8).device(device));
}

}  // namespace

void ShardUnit::lay_out_gather() {
  const int ranks = group().size();
  gather_total_ = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::size_t bytes = kHeaderBytes;
    std::vector<std::size_t>& at = gather_at_.emplace_back();
    for (const ShardedParameter& one : parameters_) {
      at.push_back(bytes);
      bytes += padded_bytes(static_cast<std::size_t>(rows_of(one.rows, ranks, rank).count * one.row_elements) *
                            one.whole.element_size());
    }
    gather_counts_.push_back(bytes);
    gather_total_ += bytes;
  }
}

void ShardUnit::start_gather() {
  const torch::NoGradGuard no_grad;
  for (const ShardedParameter& one : parameters_) {
    const bool here = exposures_ > 0 || one.parameter.data_ptr() == one.shard.data_ptr();
    if (!here || one.parameter.scalar_type() != one.shard.scalar_type())
      fail(
          format_text("parameter {} no longer lies where fully_shard put it: a conversion, set_data or a function that "
                      "replaces parameters has moved it; do that before fully_shard",
                      one.name()));
  }
  const RegisteredMemory& memory = context_->scratch(ShardContext::Use::gather, gather_total_, device_);
  const auto rank = static_cast<std::size_t>(group().rank());
  std::size_t first = 0;
  for (std::size_t r = 0; r < rank; ++r) first += gather_counts_[r];
  auto* own = static_cast<std::byte*>(memory.data()) + first;
  const auto header = static_cast<std::int64_t>(number_);
  std::vector<Tensor> to, from;
  if (device_.is_cpu()) {
    std::memcpy(own, &header, sizeof header);
  } else {
    to.push_back(bytes_at(own, sizeof header, device_).view(torch::kInt64));
    from.push_back(torch::full({1}, header, torch::TensorOptions().dtype(torch::kInt64).device(device_)));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& one = parameters_[i];
    if (one.shard.numel() == 0) continue;
    std::byte* place = own + gather_at_[rank][i];
    if (device_.is_cpu() && one.shard.scalar_type() == one.whole.scalar_type()) {
      std::memcpy(place, one.shard.data_ptr(), one.shard.nbytes());
    } else {
      to.push_back(torch::from_blob(place, one.shard.sizes(), one.whole.options()));
      from.push_back(one.shard);
    }
  }
  if (!to.empty()) copy_all(to, from);
  const Device device = device_for(device_);
  context_->start(ShardContext::Use::gather, device_, [&](const CallOptions& call) {
    return group().all_gather(ConstBuffer{own, gather_counts_[rank], DType::uint8, device},
                              Buffer{memory.data(), gather_total_, DType::uint8, device}, gather_counts_, call);
  });
}

void ShardUnit::finish_gather() {
  const torch::NoGradGuard no_grad;
  context_->wait(ShardContext::Use::gather, device_);
  check_headers();
  allocate_whole();
  auto* scratch = static_cast<std::byte*>(context_->scratch(ShardContext::Use::gather, gather_total_, device_).data());
  std::vector<Tensor> to, from;
  std::size_t first = 0;
  for (int rank = 0; rank < group().size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const ShardedParameter& one = parameters_[i];
      const RowRange rows = rows_of(one.rows, group().size(), rank);
      const std::size_t row_bytes = static_cast<std::size_t>(one.row_elements) * one.whole.element_size();
      const std::size_t bytes = static_cast<std::size_t>(rows.count) * row_bytes;
      if (bytes == 0) continue;
      std::byte* place =
          static_cast<std::byte*>(one.whole.data_ptr()) + static_cast<std::size_t>(rows.begin) * row_bytes;
      std::byte* found = scratch + first + gather_at_[r][i];
      if (device_.is_cpu()) {
        std::memcpy(place, found, bytes);
      } else {
        to.push_back(bytes_at(place, bytes, device_));
        from.push_back(bytes_at(found, bytes, device_));
      }
    }
    first += gather_counts_[r];
  }
  if (!to.empty()) copy_all(to, from);
}

// On a GPU the host would have to wait: only the first times.
void ShardUnit::check_headers() {
  if (!device_.is_cpu() && ++gathers_ > 2) return;
  auto* scratch = static_cast<std::byte*>(context_->scratch(ShardContext::Use::gather, gather_total_, device_).data());
  std::size_t first = 0;
  for (std::size_t r = 0; r < gather_counts_.size(); first += gather_counts_[r++]) {
    std::int64_t number = 0;
    if (device_.is_cpu()) {
      std::memcpy(&number, scratch + first, sizeof number);
    } else {
      number = bytes_at(scratch + first, sizeof number, device_).view(torch::kInt64).item<std::int64_t>();
    }
    if (number == number_) continue;
    context_->require_good(ShardContext::Use::gather);  // one that failed on a GPU leaves what was there before
    fail(
        format_text("rank {} of the group gathers unit {} meanwhile; all ranks call the same units in the same order, "
                    "in forward and in backward",
                    r, number));
  }
}

}  // namespace maniple::detail
