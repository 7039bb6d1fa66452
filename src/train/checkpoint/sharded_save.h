// A checkpoint that the ranks of a group write together.
//
// prepare()  in the calling thread, collective: the ranks agree on who writes what (save_plan.h), and each copies its
//            part.
// write()    in the background, collective over a separate group so that training may communicate meanwhile: rank 0
//            creates the folder under a temporary name, each rank writes and syncs its file, rank 0 writes index and
//            manifest and renames the folder. If any rank fails, all ranks learn of it and nothing is left on disk.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "train/checkpoint/part.h"
#include "train/checkpoint/save_plan.h"

namespace maniple {

using PartStates = std::vector<std::pair<std::string, PartState>>;

class ShardedSave {
 public:
  /// `ranks` may be null: this process alone. Throws InvalidArgument on all ranks or on none; an exception of `collect`
  /// is rethrown on the rank where it occurred. The previous save must have ended.
  void prepare(const std::shared_ptr<ProcessGroup>& ranks, const std::function<PartStates()>& collect);

  struct Outcome {
    bool saved = false;
    std::string error;               ///< error text; empty if none
    std::vector<std::string> notes;  ///< what was done with other checkpoints
  };
  /// Throws if ranks are lost.
  Outcome write(const std::string& folder, std::int64_t step, int keep_last, std::optional<std::int64_t> loaded);

 private:
  void compare(ProcessGroup& ranks, const PartStates& states, const std::vector<torch::Tensor>& tensors) const;
  void copy(const std::vector<HeldBox>& held, const std::vector<torch::Tensor>& tensors);
  std::string write_file(const std::string& path) const;
  CheckpointIndex index_with_texts(const std::vector<std::string>& replies) const;

  std::shared_ptr<ProcessGroup> background_;  // null: this process alone
  std::string layout_;                        // this rank's layout for which the plan was made
  SavePlan plan_;
  int rank_ = 0;

  // What this rank writes. The pieces lie in `memory_`, which is reused for every save, so that copying touches no new
  // pages.
  struct Piece {
    SafetensorsEntry entry;
    const char* data;
  };
  torch::Tensor memory_;
  std::vector<Piece> pieces_;
  std::map<std::string, std::map<std::string, std::string>> own_texts_, united_texts_;
  std::string error_;  // error text of copying
};

}  // namespace maniple
