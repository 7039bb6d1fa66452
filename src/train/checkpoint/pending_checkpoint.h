// How a checkpoint is written.
//
// It is written under another name, every file and the directory are synced, then it is renamed and the folder is
// synced. So whatever happens, a name step-... stands for a whole checkpoint.
//
// The writer holds a lock on the directory that it writes (flock, which the kernel drops when the process ends): what
// nobody locks was left behind by a writer that died, whatever process has its number now.
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

/// A checkpoint in the making. Destroyed without commit(), it leaves nothing behind.
class PendingCheckpoint {
 public:
  /// Makes the folder if need be, and clears away what dead writers left in it.
  PendingCheckpoint(std::string folder, std::int64_t step);
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  std::string path_of(const std::string& file) const { return pending_ + "/" + file; }
  void add(const std::string& file, const FileDigest& digest) { manifest_.files[file] = digest; }

  /// A checkpoint of the same step is replaced. Newer ones are not of this run, or it would not save this one now: they
  /// are set aside, so that this one is the newest. `loaded`: the run went on from there, so everything above that is
  /// not of this run. Either all of this happens or nothing. Returns what was set aside and why, a line for each.
  std::vector<std::string> commit(std::optional<std::int64_t> loaded = {});

 private:
  std::string folder_;
  std::string pending_;
  UniqueFd lock_;  // on the directory
  CheckpointManifest manifest_;
  ForkGuard guard_;
  bool committed_ = false;
};

/// A writer that died while it replaced a checkpoint may have left the old one under another name: gives it its own
/// back.
void restore_replaced(const std::string& folder);

/// Renames each from first to second, in order. If one fails, those before it are undone, and SystemError is thrown.
void rename_all(const std::vector<std::pair<std::string, std::string>>& names);

/// Makes a directory and those above it, and syncs the parent of each that was made: without that, it could be gone
/// after a power cut.
void make_directories(const std::string& path);

}  // namespace maniple
