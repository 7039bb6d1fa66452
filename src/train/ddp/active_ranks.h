// Tracks which ranks of a group still have batches, inside with_uneven_inputs (see <maniple/train/uneven_inputs.h>).
// Outside it all ranks are active, and nothing is exchanged.
#pragma once

#include <memory>
#include <optional>

#include <maniple/comm/process_group.h>

namespace maniple {

class ActiveRanks {
 public:
  struct Mode {
    bool divide_by_initial_world_size = true;
    bool throw_on_early_termination = false;
  };

  explicit ActiveRanks(std::shared_ptr<ProcessGroup> group);

  void start(const Mode& mode);  ///< with_uneven_inputs begins; throws InvalidArgument inside another one
  void stop() noexcept;          ///< with_uneven_inputs ends: all ranks are active again
  bool started() const noexcept { return mode_.has_value(); }

  /// Exchanges whether each rank has a batch; returns whether any rank has one. Throws UnevenInputs if the mode
  /// requires it. Collective.
  bool exchange(bool active);

  bool all() const noexcept { return count_ == group_->size(); }
  /// The lowest active rank. The other ranks take its buffers and its order of gradients.
  int first() const noexcept { return first_; }
  /// first() of the last exchange in which any rank was active.
  int last_first() const noexcept { return last_first_; }
  /// Whether any rank had no batch since start().
  bool were_uneven() const noexcept { return were_uneven_; }

  /// The factor for this rank's gradients that turns the average over all ranks into the average that the mode
  /// requests.
  double gradient_factor() const noexcept;

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::optional<Mode> mode_;
  int count_;
  int first_ = 0;
  int last_first_ = 0;
  bool were_uneven_ = false;
};

}  // namespace maniple
