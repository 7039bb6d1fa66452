// Writing a checkpoint.
//
// A checkpoint is written under a temporary name, every file and the directory are synced, then it is renamed and the
// folder is synced. So a directory named step-... is a whole checkpoint, whenever a crash happens.
//
// The writer holds a lock on the directory that it writes (flock, which the kernel releases when the process ends). A
// directory without a lock was left behind by a writer that died, even if another process has the writer's process id
// now.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/base/unique_fd.h"
#include "train/checkpoint/checkpoint_folder.h"

namespace maniple {

/// A checkpoint that is being written. Destroyed without commit(), it leaves nothing behind.
class PendingCheckpoint {
 public:
  /// Creates the folder if necessary, and removes what dead writers left in it.
  PendingCheckpoint(std::string folder, std::int64_t step);
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  std::string path_of(const std::string& file) const { return pending_ + "/" + file; }
  void add(const std::string& file, const FileDigest& digest) { manifest_.files[file] = digest; }

  /// Publishes the checkpoint; replaces one of the same step. Newer checkpoints belong to another run, or this run
  /// would not save this step now: they are set aside, so that this checkpoint is the newest. `loaded` is the step from
  /// which this run continued; everything above it belongs to another run. Either all of this happens or nothing.
  /// Returns what was set aside and why, one line each.
  std::vector<std::string> commit(std::optional<std::int64_t> loaded = {});

 private:
  std::string folder_;
  std::string pending_;
  UniqueFd lock_;  // on the directory
  CheckpointManifest manifest_;
  ForkGuard guard_;
  bool committed_ = false;
};

/// Restores the name of an old checkpoint that a writer renamed while replacing it, before the writer died.
void restore_replaced(const std::string& folder);

/// Renames each path from first to second, in order. If one fails, undoes the earlier ones and throws SystemError.
void rename_all(const std::vector<std::pair<std::string, std::string>>& names);

/// Creates a directory and its missing parents, and syncs the parent of each created directory: otherwise the directory
/// could be lost in a power cut.
void make_directories(const std::string& path);

}  // namespace maniple
