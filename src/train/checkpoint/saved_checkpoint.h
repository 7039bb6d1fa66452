// A checkpoint on disk as parts, texts and tensors. Any box of a tensor can be read, regardless of how many ranks wrote
// the checkpoint and how many read it. Without LibTorch, so that `maniple checkpoint` can use it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/checkpoint_index.h"
#include "train/checkpoint/safetensors.h"

namespace maniple {

class SavedCheckpoint {
 public:
  /// `path` is FOLDER/step-...; `manifest` must come from inspect_checkpoint or verify_checkpoint. Throws ProtocolError
  /// or SystemError naming the file and what is wrong.
  SavedCheckpoint(std::string path, const CheckpointManifest& manifest);
  ~SavedCheckpoint();

  const std::string& path() const noexcept { return path_; }
  bool is_sharded() const noexcept { return sharded_; }
  /// Also available if the checkpoint is not sharded: every tensor is then one piece.
  const CheckpointIndex& index() const noexcept { return index_; }
  /// The file of a part, or the whole checkpoint; messages about the part begin with it.
  std::string place_of(const std::string& part) const;

  /// Fills `to` with the elements of the box, in row-major order. The box must belong to `tensor`, and `tensor` to
  /// index().
  void read(const IndexedTensor& tensor, const TensorBox& wanted, void* to);

  /// Opens every file and compares its contents with the index. Throws as the constructor does. (read() does this for
  /// the files it needs.)
  void check_files();

 private:
  struct File;
  struct Entry {
    const IndexedTensor* tensor;
    const IndexedPiece* piece;
  };
  File& open(std::size_t file);

  std::string path_;
  bool sharded_ = false;
  CheckpointIndex index_;
  std::vector<std::unique_ptr<File>> files_;  // null: not open
  std::vector<std::size_t> open_;             // open files, in the order in which they were opened
  std::vector<std::vector<Entry>> entries_;   // per file: the pieces that the index lists
};

}  // namespace maniple
