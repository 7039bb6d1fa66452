// Gathers the parameters of a unit.
#include <cstring>

#include "comm/base/check.h"
#include "train/fully_sharded/unit.h"

namespace maniple::detail {
namespace {

/// Precedes the rows of each rank.
struct Header {
  std::int64_t unit = 0;    ///< number of the unit
  std::int64_t frozen = 0;  ///< a hash of which parameters require a gradient
};

/// A byte tensor over device memory in the scratch or in a whole parameter.
Tensor bytes_at(void* data, std::size_t bytes, torch::Device device) {
  return torch::from_blob(data, {static_cast<std::int64_t>(bytes)},
                          torch::TensorOptions().dtype(torch::kUInt8).device(device));
}

}  // namespace

void ShardUnit::lay_out_gather() {
  std::vector<PackedLayout::Rows> rows;
  for (const ShardedParameter& one : parameters_)
    rows.push_back({one.rows, one.row_elements * static_cast<std::int64_t>(one.whole.element_size())});
  gather_ = PackedLayout::by_rows(1, sizeof(Header), rows, group().size());
}

// An empty shard has no address, so it cannot have moved.
void ShardUnit::require_in_place() const {
  for (const ShardedParameter& one : parameters_) {
    const Tensor &now = one.parameter, &shard = one.shard;
    std::string what;
    if (now.scalar_type() != shard.scalar_type()) {
      what = format_text("is {} now and was {}", c10::toString(now.scalar_type()), c10::toString(shard.scalar_type()));
    } else if (now.device() != shard.device()) {
      what = format_text("is on {} now and was on {}", now.device().str(), shard.device().str());
    } else if (now.sizes() != shard.sizes()) {
      what = format_text("has shape [{}] now and had [{}]", joined(now.sizes()), joined(shard.sizes()));
    } else if (now.data_ptr() != shard.data_ptr()) {
      what = "has other memory now: its data pointer moved";
    } else {
      continue;
    }
    const_cast<ShardUnit*>(this)->fail(
        format_text("parameter {} no longer lies where fully_shard put it. This rank's part {}. to(), set_data and "
                    "functions that replace parameters do that; call them before fully_shard, or copy_ into the part",
                    one.name(), what));
  }
}

std::int64_t ShardUnit::frozen_hash() const {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const ShardedParameter& one : parameters_)
    hash = (hash ^ (one.parameter.requires_grad() ? 1 : 2)) * 1099511628211U;
  return static_cast<std::int64_t>(hash);
}

void ShardUnit::start_gather() {
  const torch::NoGradGuard no_grad;
  require_in_place();
  if (!lost_write_.empty())
    fail(
        format_text("parameter {} was written while it was whole, by a forward, a backward or under unshard(): that "
                    "write is lost; write to the parameter afterwards, where it is this rank's rows, or use "
                    "set_full_parameters",
                    lost_write_));
  const RegisteredMemory& memory = context_->scratch(ShardContext::Use::gather, gather_.bytes(), device_);
  const std::size_t rank = group().rank();
  auto* scratch = static_cast<std::byte*>(memory.data());
  std::byte* own = scratch + gather_.part_begin(rank);
  const Header header{number_, frozen_hash()};
  if (header.frozen != checked_hash_) checked_ = 0;
  checked_hash_ = header.frozen;
  std::vector<Tensor> to, from;
  if (device_.is_cpu()) {
    std::memcpy(own, &header, sizeof header);
  } else {
    // Filled on the device: a copy from the host would block the host until the stream's earlier work is done.
    const Tensor numbers = bytes_at(own, sizeof header, device_).view(torch::kInt64);
    numbers.narrow(0, 0, 1).fill_(header.unit);
    numbers.narrow(0, 1, 1).fill_(header.frozen);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& one = parameters_[i];
    if (one.shard.numel() == 0) continue;
    std::byte* place = scratch + gather_.piece(rank, i).offset;
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
    return group().all_gather(ConstBuffer{own, gather_.part_counts()[rank], DType::uint8, device},
                              Buffer{scratch, gather_.bytes(), DType::uint8, device}, gather_.part_counts(), call,
                              call.where);
  });
}

void ShardUnit::finish_gather() {
  const torch::NoGradGuard no_grad;
  context_->wait(ShardContext::Use::gather, device_);
  check_headers();
  allocate_whole();
  auto* scratch =
      static_cast<std::byte*>(context_->scratch(ShardContext::Use::gather, gather_.bytes(), device_).data());
  std::vector<Tensor> to, from;
  for (std::size_t rank = 0; rank < gather_.part_counts().size(); ++rank) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const PackedLayout::Piece piece = gather_.piece(rank, i);
      if (piece.count == 0) continue;
      std::byte* place = static_cast<std::byte*>(parameters_[i].whole.data_ptr()) + piece.begin;
      std::byte* found = scratch + piece.offset;
      if (device_.is_cpu()) {
        std::memcpy(place, found, piece.count);
      } else {
        to.push_back(bytes_at(place, piece.count, device_));
        from.push_back(bytes_at(found, piece.count, device_));
      }
    }
  }
  if (!to.empty()) copy_all(to, from);
}

// On a GPU reading the headers blocks the host, so only the first two gathers are checked.
void ShardUnit::check_headers() {
  if (!device_.is_cpu() && ++checked_ > 2) return;
  auto* scratch =
      static_cast<std::byte*>(context_->scratch(ShardContext::Use::gather, gather_.bytes(), device_).data());
  for (std::size_t r = 0; r < gather_.part_counts().size(); ++r) {
    std::byte* place = scratch + gather_.part_begin(r);
    Header header;
    if (device_.is_cpu()) {
      std::memcpy(&header, place, sizeof header);
    } else {
      const Tensor numbers = bytes_at(place, sizeof header, device_).view(torch::kInt64).cpu();
      std::memcpy(&header, numbers.data_ptr(), sizeof header);
    }
    if (header.unit == number_ && header.frozen == checked_hash_) continue;
    context_->require_good(ShardContext::Use::gather);  // a failed gather on a GPU leaves the old contents
    if (header.unit != number_)
      fail(
          format_text("rank {} of the group gathers unit {} meanwhile; all ranks call the same units in the same "
                      "order, in forward and in backward",
                      r, header.unit));
    fail(
        format_text("requires_grad of its parameters differs from rank {} of the group; after fully_shard, freeze and "
                    "unfreeze the same parameters on all ranks, between a backward and the next forward",
                    r));
  }
}

}  // namespace maniple::detail
