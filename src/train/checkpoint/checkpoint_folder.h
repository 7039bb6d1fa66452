// Checkpoints on disk: lists them, checks that they are whole, and removes old ones.
//
//   FOLDER/step-000000000120/         one checkpoint: safetensors files and manifest.json, which lists the length and
//                                     SHA-256 of each file
//   FOLDER/aside-step-000000000300/   a checkpoint that is damaged, or that was newer than the one from which a run
//                                     continued. It is never read or removed; renamed back, it is a checkpoint again.
//   FOLDER/.partial-...               a checkpoint that is being written, or whose writer died
//   FOLDER/.replaced-..., .removed-...   old checkpoints that are being replaced or removed
//
// pending_checkpoint.h describes how a new checkpoint is written. A directory named step-... was whole when it got that
// name; the hashes detect later damage on the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "train/disk_file.h"

namespace maniple {

struct CheckpointManifest {
  std::int64_t step = 0;
  std::map<std::string, FileDigest> files;
};
std::string encode(const CheckpointManifest& manifest);
/// Throws ProtocolError saying what is wrong. File names must be plain names: no slash, no leading dot.
CheckpointManifest parse_manifest(std::string_view text);

inline constexpr std::string_view kManifest = "manifest.json";
inline constexpr std::size_t kMaxFilesOfCheckpoint = 4096;
/// Whether a file in a checkpoint may have this name: no slash, no leading dot.
bool is_plain_name(std::string_view name);
inline constexpr std::string_view kRemoved = ".removed-";

std::string checkpoint_name(std::int64_t step);  ///< "step-000000000120"
/// Newest first; empty if the folder does not exist. Throws SystemError if it cannot be read.
std::vector<std::int64_t> list_checkpoints(const std::string& folder);

/// Throws ProtocolError or SystemError naming the file and what is wrong with it.
CheckpointManifest read_manifest(const std::string& folder, std::int64_t step);
/// Checks the manifest and the lengths of all files, without reading the files. Throws ProtocolError, SystemError, or
/// InvalidArgument for anything but a regular file, naming the file and what is wrong.
CheckpointManifest inspect_checkpoint(const std::string& folder, std::int64_t step);
/// Verifies a file that the manifest lists: first its length, then, by reading it, its hash. Throws ProtocolError or
/// SystemError naming the file.
void verify_file(const std::string& path, const FileDigest& expected);
/// Calls inspect_checkpoint, then verifies all files.
CheckpointManifest verify_checkpoint(const std::string& folder, std::int64_t step);

/// An unused name for setting the checkpoint aside: "aside-step-000000000300", then "...-2".
std::string name_aside(const std::string& folder, std::int64_t step);

/// Removes a directory and its contents; for a link, only the link. Does nothing if the path does not exist. Throws
/// SystemError.
void remove_checkpoint(const std::string& path);

/// Called after the newest step, `saved`, was saved. Removes all but the newest `keep` whole checkpoints (judged by
/// file lengths), `saved` included. Sets aside checkpoints that are not whole. Returns what was done and why, one line
/// each.
std::vector<std::string> prune_checkpoints(const std::string& folder, int keep, std::int64_t saved);

}  // namespace maniple
