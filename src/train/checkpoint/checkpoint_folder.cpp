#include "train/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include <nlohmann/json.hpp>

#include "comm/base/check.h"
#include "comm/base/files.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "maniple-checkpoint-1";
constexpr std::string_view kStep = "step-";
constexpr std::string_view kAside = "aside-";
constexpr std::size_t kMaxManifestBytes = std::size_t{1} << 20;

bool exists(const std::string& path) {
  struct stat status{};
  return ::lstat(path.c_str(), &status) == 0;
}

/// Opens a file that the manifest lists. Compares its length before anything is read: hashing a file that was
/// lengthened takes hours.
RegularFile open_listed(const std::string& path, const FileDigest& expected) {
  RegularFile file(path);
  if (file.size() != expected.bytes)
    throw ProtocolError(format_text("{} has {} bytes; {} were saved", path, file.size(), expected.bytes));
  return file;
}

}  // namespace

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

std::string encode(const CheckpointManifest& manifest) {
  Json files = Json::object();
  for (const auto& [name, digest] : manifest.files) files[name] = {{"bytes", digest.bytes}, {"sha256", digest.sha256}};
  return Json{{"format", kFormat}, {"step", manifest.step}, {"files", files}}.dump(2) + "\n";
}

CheckpointManifest parse_manifest(std::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, false);
  if (json.is_discarded() || !json.is_object()) throw ProtocolError("the manifest is not valid JSON");
  const auto format = json.find("format");
  if (format == json.end() || *format != kFormat) throw ProtocolError("the manifest is of another format");
  const auto step = json.find("step");
  const auto files = json.find("files");
  if (step == json.end() || !step->is_number_unsigned() || step->get<std::uint64_t>() > INT64_MAX) {
    throw ProtocolError("the manifest has no step");
  }
  if (files == json.end() || !files->is_object() || files->size() > kMaxFilesOfCheckpoint)
    throw ProtocolError("the manifest has no files");
  CheckpointManifest manifest;
  manifest.step = step->get<std::int64_t>();
  for (const auto& [name, value] : files->items()) {
    if (!is_plain_name(name)) throw ProtocolError("the manifest names a file outside the checkpoint");
    const auto bytes = value.find("bytes");
    const auto hash = value.find("sha256");
    if (!value.is_object() || bytes == value.end() || !bytes->is_number_unsigned() || hash == value.end() ||
        !hash->is_string() || hash->get_ref<const std::string&>().size() != 64) {
      throw ProtocolError(format_text("the manifest's entry for {} has no length and hash", name));
    }
    manifest.files[name] = {bytes->get<std::uint64_t>(), hash->get<std::string>()};
  }
  return manifest;
}

std::string checkpoint_name(std::int64_t step) { return format_text("{}{:012}", kStep, step); }

std::vector<std::int64_t> list_checkpoints(const std::string& folder) {
  // A folder that cannot be read may hold checkpoints, and silently starting a new run would be a surprise.
  const UniqueFd fd = open_file(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (!fd && errno != ENOENT) throw_system_error("look into the checkpoint folder " + folder);
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with(kStep)) continue;
    std::int64_t step = 0;
    const auto [end, error] = std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
    if (error == std::errc() && end == name.data() + name.size() && name == checkpoint_name(step))
      steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

CheckpointManifest read_manifest(const std::string& folder, std::int64_t step) {
  const std::string path = folder + "/" + checkpoint_name(step);
  CheckpointManifest manifest;
  try {
    manifest = parse_manifest(read_small_file(path + "/" + std::string(kManifest), kMaxManifestBytes));
  } catch (const ProtocolError& error) {
    throw ProtocolError(format_text("{}/{}: {}", path, kManifest, error.what()));
  }
  if (manifest.step != step) {
    throw ProtocolError(format_text("{}: its manifest is of step {}", path, manifest.step));
  }
  return manifest;
}

CheckpointManifest inspect_checkpoint(const std::string& folder, std::int64_t step) {
  const CheckpointManifest manifest = read_manifest(folder, step);
  const std::string path = folder + "/" + checkpoint_name(step);
  for (const auto& [name, expected] : manifest.files) open_listed(path + "/" + name, expected);
  return manifest;
}

void verify_file(const std::string& path, const FileDigest& expected) {
  if (digest_of(open_listed(path, expected)) != expected)
    throw ProtocolError(format_text("{} is damaged: its SHA-256 is not the one that was saved", path));
}

CheckpointManifest verify_checkpoint(const std::string& folder, std::int64_t step) {
  const CheckpointManifest manifest = inspect_checkpoint(folder, step);
  const std::string path = folder + "/" + checkpoint_name(step);
  for (const auto& [name, expected] : manifest.files) verify_file(path + "/" + name, expected);
  return manifest;
}

std::string name_aside(const std::string& folder, std::int64_t step) {
  std::string name = format_text("{}{}", kAside, checkpoint_name(step));
  for (int copy = 2; exists(folder + "/" + name); ++copy) {
    name = format_text("{}{}-{}", kAside, checkpoint_name(step), copy);
  }
  return name;
}

void remove_checkpoint(const std::string& path) {
  if (::unlink(path.c_str()) == 0) return;  // a link: its target is not ours
  remove_tree(path);
  if (exists(path)) throw_system_error("remove " + path);
}

std::vector<std::string> prune_checkpoints(const std::string& folder, int keep, std::int64_t saved) {
  std::vector<std::string> notes;
  int kept = 0;
  for (const std::int64_t step : list_checkpoints(folder)) {
    const std::string path = folder + "/" + checkpoint_name(step);
    std::string error;
    if (step != saved) {
      try {
        inspect_checkpoint(folder, step);
      } catch (const SystemError& failure) {
        if (failure.code() != ENOENT && failure.code() != ENOTDIR) continue;  // it may be readable the next time
        error = failure.what();
      } catch (const Error& failure) {
        error = failure.what();
      }
    }
    if (!error.empty()) {
      const std::string aside = name_aside(folder, step);
      if (::rename(path.c_str(), (folder + "/" + aside).c_str()) != 0) throw_system_error("rename " + path);
      notes.push_back(format_text("{} was set aside as {}: {}", checkpoint_name(step), aside, error));
      log_warning("{}: {}", folder, notes.back());
      continue;
    }
    if (step == saved || kept < keep) {
      ++kept;
      continue;
    }
    // Renamed first, so that a directory named step-... is never half a checkpoint.
    const std::string removed = format_text("{}/{}{}", folder, kRemoved, checkpoint_name(step));
    remove_checkpoint(removed);
    if (::rename(path.c_str(), removed.c_str()) != 0) throw_system_error("rename " + path);
    remove_checkpoint(removed);
    notes.push_back(
        format_text("{} was removed: {} newer ones are whole, and keep_last is {}", checkpoint_name(step), kept, keep));
    log_info("{}: {}", folder, notes.back());
  }
  return notes;
}

}  // namespace maniple
