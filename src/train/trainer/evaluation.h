// What an evaluation changes temporarily, and how ranks that compute together evaluate different numbers of batches.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"
#include <maniple/comm/process_group.h>

namespace maniple {

/// Puts a module into training or evaluation mode; the destructor restores the mode of each submodule. Does nothing if
/// the module is already in that mode, even if some submodules are not.
class ModuleMode {
 public:
  ModuleMode(torch::nn::Module& module, bool training) {
    if (module.is_training() == training) return;
    for (const auto& part : module.modules()) before_.emplace_back(part, part->is_training());
    module.train(training);
  }
  ~ModuleMode() {
    for (const auto& [part, training] : before_) part->train(training);  // parents first: train() reaches all below
  }
  ModuleMode(const ModuleMode&) = delete;
  ModuleMode& operator=(const ModuleMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> before_;
};

/// Evaluation on ranks that communicate in forward and may have different numbers of batches. A rank that has finished
/// its last batch computes that batch again, without counting it, until all ranks have finished.
class Rounds {
 public:
  explicit Rounds(ProcessGroup* ranks) : ranks_(ranks != nullptr && ranks->size() > 1 ? ranks : nullptr) {}
  bool together() const noexcept { return ranks_ != nullptr; }
  void begin() {
    any_ = true;
    agree(kComputes);
  }
  bool others_go_on() { return ranks_ != nullptr && agree(kWaits) == kComputes; }
  void end() {
    if (!any_) agree(kHasNone);
  }

 private:
  static constexpr std::uint8_t kWaits = 0, kComputes = 1, kHasNone = 2;
  std::uint8_t agree(std::uint8_t mine) {
    if (ranks_ == nullptr) return mine;
    const std::uint8_t all = over_ranks(mine);
    if (all != kHasNone || over_ranks(any_ ? 1 : 0) == 0) return all;
    throw InvalidArgument(
        format_text("Trainer: {} has no batch to evaluate and other ranks have some, but with this strategy all ranks "
                    "compute together; evaluate at least one sample per rank",
                    any_ ? "another rank" : format_text("rank {}", ranks_->rank())));
  }
  std::uint8_t over_ranks(std::uint8_t mine) const {
    ranks_->all_reduce(buffer_of(mine), ReduceOp::max, {}, public_place());
    return mine;
  }

  ProcessGroup* ranks_;
  bool any_ = false;
};

}  // namespace maniple
