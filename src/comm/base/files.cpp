#include "comm/base/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>

#include "comm/base/unique_fd.h"

namespace maniple {

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(directory.c_str()), &::closedir);
  if (!open) return names;
  while (const dirent* entry = ::readdir(open.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

std::string link_target(const std::string& path) {
  std::array<char, PATH_MAX> target;
  const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
  return length > 0 ? std::string(target.data(), length) : std::string();
}

// Does not use streams: setting one up takes as long as reading a file of /proc.
std::string file_text(const std::string& path) {
  constexpr std::size_t kStep = 4096;
  const UniqueFd file = open_file(path, O_RDONLY | O_CLOEXEC);
  if (!file) return {};
  std::string text;
  std::size_t size = 0;
  while (true) {
    text.resize(size + kStep);
    const ssize_t got = ::read(file.get(), text.data() + size, kStep);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    size += got;
  }
  text.resize(size);
  return text;
}

std::vector<std::string> paths_below(const std::string& directory) {
  std::vector<std::string> paths;
  for (const std::string& name : names_in(directory)) {
    const std::string path = directory + "/" + name;
    paths.push_back(path);
    struct stat status{};
    if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) continue;
    for (std::string& below : paths_below(path)) paths.push_back(std::move(below));
  }
  return paths;
}

void remove_tree(const std::string& directory) noexcept try {
  const std::vector<std::string> paths = paths_below(directory);
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) {
    if (::unlink(path->c_str()) != 0) ::rmdir(path->c_str());
  }
  ::rmdir(directory.c_str());
} catch (...) {
  // Out of memory for the list: the directory stays.
}

std::string temporary_folder() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

}  // namespace maniple
