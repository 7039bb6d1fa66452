// The plan of a sharded save: which rank writes what. It is computed from what each rank holds, and is the same on all
// ranks.
//
// Every rank describes its boxes of every tensor. Boxes that several ranks hold are replicas. Each is written once, by
// one of these ranks, chosen so that all ranks write about the same number of bytes; large boxes are cut for that. The
// boxes of a tensor must cover it without overlap: otherwise a part of the model would silently not be saved. Pure
// functions, without LibTorch and without communication.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/checkpoint/checkpoint_index.h"

namespace maniple {

/// A rank's box of a tensor.
struct HeldBox {
  std::string part;
  std::string name;
  std::string dtype;
  Extents shape;
  TensorBox box;
  /// Replicas may differ, and the lowest rank's is saved. Set for buffers of a module, which DistributedDataParallel
  /// does not average.
  bool of_lowest_rank = false;
  friend bool operator==(const HeldBox&, const HeldBox&) = default;
};

std::string encode_held(const std::vector<HeldBox>& held);
std::vector<HeldBox> decode_held(std::string_view bytes);  ///< throws ProtocolError

struct SavePlan {
  struct Item {
    std::size_t held = 0;  ///< index in this rank's list
    TensorBox box;         ///< the part of the held box to write
    std::string key;       ///< name in this rank's file
  };
  struct Holder {
    std::size_t rank = 0;
    std::size_t held = 0;
  };
  std::vector<std::vector<Item>> items;       ///< by rank, in file order
  std::vector<std::vector<Holder>> replicas;  ///< boxes that several ranks hold and that must be equal on those ranks
  std::vector<std::string> replica_names;     ///< for messages: tensor "w" of part "model"
  CheckpointIndex index;                      ///< without texts
};

/// Throws InvalidArgument naming the tensor, the ranks and the conflict.
SavePlan make_save_plan(const std::vector<std::vector<HeldBox>>& held_by_rank);

}  // namespace maniple
