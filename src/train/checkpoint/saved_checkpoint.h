// One checkpoint on the disk as parts, texts and tensors, of which any box can be read: whether one rank wrote it or
// many, and however many read it now. Without LibTorch, so `maniple checkpoint` has it, too.
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
  /// `path` is FOLDER/step-...; `manifest` as inspect_checkpoint or verify_checkpoint gave it. Throws ProtocolError or
  /// SystemError naming the file and what is wrong with it.
  SavedCheckpoint(std::string path, const CheckpointManifest& manifest);
  ~SavedCheckpoint();

  const std::string& path() const noexcept { return path_; }
  bool is_sharded() const noexcept { return sharded_; }
  /// Of one that is not sharded, too: every tensor is one piece there.
  const CheckpointIndex& index() const noexcept { return index_; }
  /// The file that holds a part, or the whole checkpoint: what a message about the part begins with.
  std::string place_of(const std::string& part) const;

  /// Fills `to` with the elements of the box, in row-major order. The box must be one of this tensor, and `tensor` of
  /// this index.
  void read(const IndexedTensor& tensor, const TensorBox& wanted, void* to);

  /// Opens every file, and compares what it holds with the index. Throws as the constructor does. (Reading does this
  /// for the files it needs.)
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
  std::vector<std::size_t> open_;             // in the order in which they were opened
  std::vector<std::vector<Entry>> entries_;   // what the index says of each file
};

}  // namespace maniple
