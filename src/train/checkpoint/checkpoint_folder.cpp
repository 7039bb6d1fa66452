#include "train/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/files.h"
#include "base/log.h"
#include "base/system_error.h"

namespace maniple {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "maniple-checkpoint-1";
constexpr std::string_view kManifest = "manifest.json";
constexpr std::string_view kStep = "step-";
constexpr std::string_view kPartial = ".partial-";
constexpr std::size_t kMostManifestBytes = std::size_t{1} << 20;
constexpr std::size_t kMostFiles = 4096;

/// A checkpoint is flat: files only.
void remove_directory(const std::string& path) {
  for (const std::string& name : names_in(path)) {
    if (::unlink((path + "/" + name).c_str()) != 0) throw_system_error("remove " + path + "/" + name);
  }
  if (::rmdir(path.c_str()) != 0 && errno != ENOENT) throw_system_error("remove " + path);
}

void make_directories(const std::string& path) {
  for (std::size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    if (::mkdir(path.substr(0, end).c_str(), 0777) != 0 && errno != EEXIST) throw_system_error("make " + path.substr(0, end));
  }
}

/// ".partial-step-000000000120-4711" belongs to process 4711.
bool writer_is_alive(std::string_view name) {
  const auto dash = name.rfind('-');
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data() + dash + 1, name.data() + name.size(), pid);
  if (error != std::errc() || end != name.data() + name.size() || pid <= 0) return false;
  return pid == ::getpid() || ::kill(pid, 0) == 0 || errno == EPERM;
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

}  // namespace

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
  if (files == json.end() || !files->is_object() || files->size() > kMostFiles) throw ProtocolError("the manifest has no files");
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

PendingCheckpoint::PendingCheckpoint(std::string folder, std::int64_t step) : folder_(std::move(folder)) {
  MANIPLE_REQUIRE(step >= 0, "a checkpoint of step {}: steps begin with 0", step);
  manifest_.step = step;
  make_directories(folder_);
  for (const std::string& name : names_in(folder_)) {
    if (!name.starts_with(kPartial) || writer_is_alive(name)) continue;
    log_info("{}/{}: left behind by a process that died while saving; removed", folder_, name);
    remove_directory(folder_ + "/" + name);
  }
  pending_ = format_text("{}/{}{}-{}", folder_, kPartial, checkpoint_name(step), ::getpid());
  if (::mkdir(pending_.c_str(), 0777) != 0) throw_system_error("make " + pending_);
}

PendingCheckpoint::~PendingCheckpoint() {
  if (committed_) return;
  try {
    remove_directory(pending_);
  } catch (const Error& error) {
    log_warning("{}", error.what());
  }
}

void PendingCheckpoint::commit() {
  DurableFile manifest(path_of(std::string(kManifest)));
  manifest.write(encode(manifest_));
  manifest.finish();
  sync_directory(pending_);
  const std::string final_name = folder_ + "/" + checkpoint_name(manifest_.step);
  // A directory that is not empty cannot be replaced in one step: the old one of the same step goes out of the way first. If
  // we die in between, the one before it is the newest.
  const std::string old = format_text("{}/{}old-{}-{}", folder_, kPartial, checkpoint_name(manifest_.step), ::getpid());
  const bool replaced = ::rename(final_name.c_str(), old.c_str()) == 0;
  if (::rename(pending_.c_str(), final_name.c_str()) != 0) throw_system_error("rename to " + final_name);
  committed_ = true;
  sync_directory(folder_);
  if (replaced) remove_directory(old);
}

std::string checkpoint_name(std::int64_t step) { return format_text("{}{:012}", kStep, step); }

std::vector<std::int64_t> list_checkpoints(const std::string& folder) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with(kStep)) continue;
    std::int64_t step = 0;
    const auto [end, error] = std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
    if (error == std::errc() && end == name.data() + name.size() && name == checkpoint_name(step)) steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

CheckpointManifest verify_checkpoint(const std::string& folder, std::int64_t step) {
  const std::string path = folder + "/" + checkpoint_name(step);
  CheckpointManifest manifest;
  try {
    manifest = parse_manifest(read_small_file(path + "/" + std::string(kManifest), kMostManifestBytes));
  } catch (const ProtocolError& error) {
    throw ProtocolError(format_text("{}/{}: {}", path, kManifest, error.what()));
  }
  if (manifest.step != step) {
    throw ProtocolError(format_text("{}: its manifest is of step {}", path, manifest.step));
  }
  for (const auto& [name, expected] : manifest.files) {
    const FileDigest found = digest_of(path + "/" + name);
    if (found.bytes != expected.bytes) {
      throw ProtocolError(format_text("{}/{} has {} bytes; {} were saved", path, name, found.bytes, expected.bytes));
    }
    if (found.sha256 != expected.sha256) {
      throw ProtocolError(format_text("{}/{} is damaged: its SHA-256 is not the one that was saved", path, name));
    }
  }
  return manifest;
}

void prune_checkpoints(const std::string& folder, int keep) {
  const std::vector<std::int64_t> steps = list_checkpoints(folder);
  for (std::size_t i = static_cast<std::size_t>(std::max(1, keep)); i < steps.size(); ++i) {
    // Renamed first, so that no name step-... ever stands for half a checkpoint.
    const std::string name = checkpoint_name(steps[i]);
    const std::string old = format_text("{}/{}old-{}-{}", folder, kPartial, name, ::getpid());
    if (::rename((folder + "/" + name).c_str(), old.c_str()) == 0) remove_directory(old);
  }
}

}  // namespace maniple
