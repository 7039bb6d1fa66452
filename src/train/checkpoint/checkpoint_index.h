// The index of a checkpoint that many ranks wrote: the places of the pieces of every tensor.
//
// A sharded checkpoint has one safetensors file per rank, with what that rank held, and index.json. The index describes
// each part as a whole: its texts, and the dtype, shape and pieces of each tensor. A piece is a box (tensor_box.h) of
// the tensor, in one file under one key. The manifest lists these files like all others, so they are checked for damage
// in the same way.
//
// The index is not trusted: its size is bounded, and pieces that overlap, leave holes or lie outside the tensor are
// refused, naming the tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "train/checkpoint/tensor_box.h"

namespace maniple {

inline constexpr std::string_view kIndexFile = "index.json";
inline constexpr std::size_t kMaxIndexBytes = std::size_t{1} << 28;

struct IndexedPiece {
  TensorBox box;
  std::size_t file = 0;  ///< index into CheckpointIndex::files
  std::string key;       ///< the tensor's name in that file
  friend bool operator==(const IndexedPiece&, const IndexedPiece&) = default;
};

struct IndexedTensor {
  std::string dtype;  ///< as safetensors spells it
  Extents shape;
  Extents view;  ///< the view of all its boxes
  std::vector<IndexedPiece> pieces;
  friend bool operator==(const IndexedTensor&, const IndexedTensor&) = default;
};

struct IndexedPart {
  std::map<std::string, std::string> texts;
  std::map<std::string, IndexedTensor> tensors;
  friend bool operator==(const IndexedPart&, const IndexedPart&) = default;
};

struct CheckpointIndex {
  std::vector<std::string> files;  ///< one for each rank that wrote the checkpoint
  std::map<std::string, IndexedPart> parts;
  friend bool operator==(const CheckpointIndex&, const CheckpointIndex&) = default;
};

/// Throws InvalidArgument for texts that are not valid UTF-8.
std::string encode_index(const CheckpointIndex& index);
/// Throws ProtocolError saying which tensor is wrong and how.
CheckpointIndex parse_index(std::string_view text);

/// "rank-00003-of-00008.safetensors"
std::string rank_file_name(std::size_t rank, std::size_t ranks);

}  // namespace maniple
