// Checkpoints on the disk: which there are, whether they are whole, and which are kept.
//
//   FOLDER/step-000000000120/         one checkpoint: safetensors files and manifest.json, which lists each with length
//                                     and SHA-256
//   FOLDER/aside-step-000000000300/   one that is damaged, or that a run left behind which went on from an earlier one.
//                                     Nobody looks at it, nobody removes it; under its old name it is a checkpoint
//                                     again.
//   FOLDER/.partial-...               one that is being written, or whose writer died
//   FOLDER/.replaced-..., .removed-...   on their way out
//
// How a new one is written is in pending_checkpoint.h; a name step-... stands for a whole checkpoint. The hashes tell
// what a disk has done to it since.
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
/// Throws ProtocolError saying what is wrong. File names are plain names: no slash, no leading dot.
CheckpointManifest parse_manifest(std::string_view text);

inline constexpr std::string_view kManifest = "manifest.json";
inline constexpr std::size_t kMostFilesOfCheckpoint = 4096;
/// Of a file in a checkpoint: no slash, no leading dot.
bool is_plain_name(std::string_view name);
inline constexpr std::string_view kRemoved = ".removed-";

std::string checkpoint_name(std::int64_t step);  ///< "step-000000000120"
/// Newest first; empty if there is no folder. Throws SystemError if there is one that cannot be read.
std::vector<std::int64_t> list_checkpoints(const std::string& folder);

/// Throws ProtocolError or SystemError naming the file and what is wrong with it.
CheckpointManifest read_manifest(const std::string& folder, std::int64_t step);
/// Looks at the manifest and at the lengths of all files, without reading them. Throws ProtocolError, SystemError, or
/// InvalidArgument for what is no regular file, naming the file and what is wrong with it.
CheckpointManifest inspect_checkpoint(const std::string& folder, std::int64_t step);
/// Compares a file that the manifest lists: its length first, then, reading it, its hash. Throws ProtocolError or
/// SystemError naming it.
void verify_file(const std::string& path, const FileDigest& expected);
/// The same for all files, after inspect_checkpoint.
CheckpointManifest verify_checkpoint(const std::string& folder, std::int64_t step);

/// A name under which the checkpoint can be set aside, which nothing has yet: "aside-step-000000000300", then "...-2".
std::string name_aside(const std::string& folder, std::int64_t step);

/// Removes a directory and what it holds; of a link, the link. Nothing is there: fine. Throws SystemError.
void remove_checkpoint(const std::string& path);

/// After step `saved`, the newest, was saved: removes all but the newest `keep` that are whole (by their lengths);
/// `saved` is one of them. Those that are not are set aside. Returns what was done and why, a line for each.
std::vector<std::string> prune_checkpoints(const std::string& folder, int keep, std::int64_t saved);

}  // namespace maniple
