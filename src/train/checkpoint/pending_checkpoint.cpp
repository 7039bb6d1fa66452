#include "train/checkpoint/pending_checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "comm/base/check.h"
#include "comm/base/files.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kReplaced = ".replaced-";

UniqueFd open_directory(const std::string& path) {
  return open_file(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

/// Locks a directory exclusively while the descriptor is open; returns none if another process has the lock.
UniqueFd locked_directory(const std::string& path) {
  UniqueFd fd = kept_from_children(open_directory(path));  // a child would keep the lock after its parent died
  if (fd && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) fd.reset();
  return fd;
}

void clear_away(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    if (name.starts_with(kRemoved)) remove_checkpoint(path);
    if (!name.starts_with(kPartial) || !locked_directory(path)) continue;
    log_info("{}: left behind by a process that died while saving; removed", path);
    remove_checkpoint(path);
  }
}

}  // namespace

void make_directories(const std::string& path) {
  for (std::size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string made = path.substr(0, end);
    if (::mkdir(made.c_str(), 0777) == 0) {
      sync_parent(made);
    } else if (errno != EEXIST) {
      throw_system_error("make " + made);
    }
  }
}

void rename_all(const std::vector<std::pair<std::string, std::string>>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (::rename(names[i].first.c_str(), names[i].second.c_str()) == 0) continue;
    const int code = errno;
    for (std::size_t done = i; done-- > 0;) {
      if (::rename(names[done].second.c_str(), names[done].first.c_str()) == 0) continue;
      log_warning("{} could not be renamed back to {}: {}", names[done].second, names[done].first, errno_text(errno));
    }
    throw_system_error(format_text("rename {} to {}", names[i].first, names[i].second), code);
  }
}

// The lock excludes a writer that is between its two renames.
void restore_replaced(const std::string& folder) {
  UniqueFd lock;
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with(kReplaced)) continue;
    if (!lock) lock = locked_directory(folder);
    if (!lock) return;
    const std::string path = folder + "/" + name;
    const std::string old = folder + "/" + name.substr(kReplaced.size());
    if (::access(old.c_str(), F_OK) == 0) {
      remove_checkpoint(path);
    } else if (::rename(path.c_str(), old.c_str()) == 0) {
      log_warning("{}: its writer died while it replaced it; the old one is used", old);
    }
  }
}

PendingCheckpoint::PendingCheckpoint(std::string folder, std::int64_t step) : folder_(std::move(folder)) {
  MANIPLE_REQUIRE(step >= 0, "a checkpoint of step {}: steps begin with 0", step);
  manifest_.step = step;
  make_directories(folder_);
  restore_replaced(folder_);
  clear_away(folder_);
  const std::string name = format_text("{}/{}{}-{}", folder_, kPartial, checkpoint_name(step), ::getpid());
  pending_ = name;
  // A process in another container may have the same process id.
  for (int copy = 2; ::mkdir(pending_.c_str(), 0777) != 0; ++copy) {
    if (errno != EEXIST) throw_system_error("make " + pending_);
    pending_ = format_text("{}-{}", name, copy);
  }
  lock_ = locked_directory(pending_);
}

PendingCheckpoint::~PendingCheckpoint() {
  if (committed_ || !guard_.owned()) return;  // in a child of fork() the parent owns it and may be writing it
  try {
    remove_checkpoint(pending_);
  } catch (const Error& error) {
    log_warning("{}", error.what());
  }
}

std::vector<std::string> PendingCheckpoint::commit(std::optional<std::int64_t> loaded) {
  DurableFile manifest(path_of(std::string(kManifest)));
  manifest.write(encode(manifest_));
  manifest.finish();
  sync_directory(pending_);

  const UniqueFd lock = locked_directory(folder_);
  const std::int64_t step = manifest_.step;
  const std::int64_t last_of_run = loaded ? std::min(*loaded, step) : step;
  std::vector<std::pair<std::string, std::string>> names;
  std::vector<std::string> notes;
  std::string replaced;
  for (const std::int64_t other : list_checkpoints(folder_)) {
    const std::string name = checkpoint_name(other);
    if (other > last_of_run) {
      const std::string aside = name_aside(folder_, other);
      names.emplace_back(folder_ + "/" + name, folder_ + "/" + aside);
      notes.push_back(format_text("{} was set aside as {}: it is newer than step {}, {}", name, aside, last_of_run,
                                  last_of_run == step ? "which is saved now" : "with which this run went on"));
    } else if (other == step) {
      // rename() cannot replace a directory that is not empty: the old one is moved away first.
      replaced = format_text("{}/{}{}", folder_, kReplaced, name);
      remove_checkpoint(replaced);
      names.emplace_back(folder_ + "/" + name, replaced);
    }
  }
  names.emplace_back(pending_, folder_ + "/" + checkpoint_name(step));
  rename_all(names);
  committed_ = true;
  for (const std::string& note : notes) log_warning("{}: {}", folder_, note);
  sync_directory(folder_);
  if (!replaced.empty()) remove_checkpoint(replaced);
  return notes;
}

}  // namespace maniple
