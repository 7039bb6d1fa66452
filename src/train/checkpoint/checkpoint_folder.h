// Checkpoints on the disk: which there are, whether they are whole, and how a new one comes to be.
//
//   FOLDER/step-000000000120/     one checkpoint: safetensors files and manifest.json, which lists each with length and SHA-256
//   FOLDER/.partial-...           one that is being written, or whose writer died
//
// A checkpoint is written under the other name, every file and the directory are synced, then it is renamed and FOLDER is synced.
// So whatever happens, a name step-... stands for a whole checkpoint; the hashes tell what a disk has done to it since.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "train/checkpoint/durable_file.h"

namespace maniple {

struct CheckpointManifest {
  std::int64_t step = 0;
  std::map<std::string, FileDigest> files;
};
std::string encode(const CheckpointManifest& manifest);
/// Throws ProtocolError saying what is wrong. File names are plain names: no slash, no leading dot.
CheckpointManifest parse_manifest(std::string_view text);

/// A checkpoint in the making. Destroyed without commit(), it leaves nothing behind.
class PendingCheckpoint {
 public:
  /// Makes the folder if need be, and removes what dead writers left in it.
  PendingCheckpoint(std::string folder, std::int64_t step);
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  std::string path_of(const std::string& file) const { return pending_ + "/" + file; }
  void add(const std::string& file, const FileDigest& digest) { manifest_.files[file] = digest; }

  /// A checkpoint of the same step is replaced.
  void commit();

 private:
  std::string folder_;
  std::string pending_;
  CheckpointManifest manifest_;
  bool committed_ = false;
};

std::string checkpoint_name(std::int64_t step);                    ///< "step-000000000120"
std::vector<std::int64_t> list_checkpoints(const std::string& folder);  ///< newest first; empty if there is no folder

/// Reads every file of a checkpoint and compares. Throws ProtocolError or SystemError naming the file and what is wrong with it.
CheckpointManifest verify_checkpoint(const std::string& folder, std::int64_t step);

/// Removes all but the newest `keep`.
void prune_checkpoints(const std::string& folder, int keep);

}  // namespace maniple
