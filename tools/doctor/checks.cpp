#include "tools/doctor/checks.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>

#include <fmt/format.h>

#include "comm/base/unique_fd.h"

namespace maniple::doctor {

const char* to_string(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::ok: return "ok";
    case Verdict::warn: return "warn";
    case Verdict::fail: return "FAIL";
  }
  return "?";
}

std::string size_text(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit > 0 && bytes < 10 ? 1 : 0, kUnits[unit]);
}

std::span<const Check> checks() noexcept {
  static constexpr Check kChecks[] = {
      {"network", [] { return judge(inspect_network()); }},
      {"sharing", [] { return judge(inspect_sharing()); }},
      {"limits", [] { return judge(inspect_limits()); }},
      {"processors", [] { return judge(inspect_processors()); }},
      {"blas", [] { return judge(inspect_blas()); }},
      {"gpus", [] { return judge(inspect_gpus()); }},
      {"backends", [] { return judge(inspect_backends()); }},
      {"clock", [] { return judge(inspect_clock()); }},
      {"disk", [] { return judge(inspect_disk()); }},
  };
  return kChecks;
}

std::optional<std::string> read_small_file(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return std::nullopt;
  std::string text(4096, '\0');
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  if (got < 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(got));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  DIR* entries = ::opendir(directory.c_str());
  if (entries == nullptr) return names;
  while (const dirent* entry = ::readdir(entries)) names.emplace_back(entry->d_name);
  ::closedir(entries);
  return names;
}

std::string real_path(const std::string& path) {
  char resolved[PATH_MAX];
  return ::realpath(path.c_str(), resolved) != nullptr ? resolved : "";
}

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const auto end = std::min(text.find(at), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::vector<std::string> library_directories() {
  const char* path = std::getenv("LD_LIBRARY_PATH");
  std::vector<std::string> directories = split(path != nullptr ? path : "", ':');
  for (const char* known :
       {"/usr/local/lib", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"}) {
    directories.emplace_back(known);
  }
  return directories;
}

std::string find_library(const std::string& name) {
  for (const std::string& directory : library_directories()) {
    const std::string found = real_path(directory + "/" + name);
    if (!found.empty()) return found;
  }
  return "";
}

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  for (const std::string& directory : split(path != nullptr ? path : "", ':')) {
    const std::string candidate = directory + "/" + name;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

}  // namespace maniple::doctor
