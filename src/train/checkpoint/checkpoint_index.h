// The index of a checkpoint that many ranks wrote: where the pieces of every tensor are.
//
// A sharded checkpoint has one safetensors file for each rank, with whatever this rank held, and index.json, which
// describes each part as a whole: its texts, and of each tensor dtype, shape and pieces. A piece is a box
// (tensor_box.h) of the tensor, in one file under one key. The manifest lists these files like all others, so what is
// said there of damage holds here, too.
//
// The index comes from outside: it is bounded, and pieces that overlap, leave holes or lie outside are refused, naming
// the tensor.
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
inline constexpr std::size_t kMostIndexBytes = std::size_t{1} << 28;

struct IndexedPiece {
  TensorBox box;
  std::size_t file = 0;  ///< place in CheckpointIndex::files
  std::string key;       ///< the tensor's name in that file
  friend bool operator==(const IndexedPiece&, const IndexedPiece&) = default;
};

struct IndexedTensor {
  std::string dtype;  ///< as safetensors spells it
  Extents shape;
  Extents view;  ///< of all of its boxes
  std::vector<IndexedPiece> pieces;
  friend bool operator==(const IndexedTensor&, const IndexedTensor&) = default;
};

struct IndexedPart {
  std::map<std::string, std::string> texts;
  std::map<std::string, IndexedTensor> tensors;
  friend bool operator==(const IndexedPart&, const IndexedPart&) = default;
};

struct CheckpointIndex {
  std::vector<std::string> files;  ///< one for each rank that wrote it
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
