// Who writes what: made from what each rank holds, the same on all ranks.
//
// Every rank describes its boxes of every tensor. Boxes that several ranks hold are replicas: they are written once, by
// one of these ranks, so that all have about as many bytes to write; large ones are cut for that. All boxes of a tensor
// must be the whole without overlap, or a part of the model would silently not be saved. Pure: without LibTorch,
// without communication.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/checkpoint/checkpoint_index.h"

namespace maniple {

/// A box that a rank holds of a tensor.
struct HeldBox {
  std::string part;
  std::string name;
  std::string dtype;
  Extents shape;
  TensorBox box;
  /// Replicas may differ, and that of the lowest rank counts: buffers of a module, which DistributedDataParallel does
  /// not average.
  bool of_lowest_rank = false;
  friend bool operator==(const HeldBox&, const HeldBox&) = default;
};

std::string encode_held(const std::vector<HeldBox>& held);
std::vector<HeldBox> decode_held(std::string_view bytes);  ///< throws ProtocolError

struct SavePlan {
  struct Item {
    std::size_t held = 0;  ///< place in this rank's list
    TensorBox box;         ///< this part of it
    std::string key;       ///< in this rank's file
  };
  struct Holder {
    std::size_t rank = 0;
    std::size_t held = 0;
  };
  std::vector<std::vector<Item>> items;       ///< by rank, in the order of the file
  std::vector<std::vector<Holder>> replicas;  ///< boxes that several ranks hold, and that must be equal on them
  std::vector<std::string> replica_names;     ///< for messages: tensor "w" of part "model"
  CheckpointIndex index;                      ///< without texts
};

/// Throws InvalidArgument naming the tensor, the ranks, and what does not fit.
SavePlan make_save_plan(const std::vector<std::vector<HeldBox>>& held_by_rank);

}  // namespace maniple
