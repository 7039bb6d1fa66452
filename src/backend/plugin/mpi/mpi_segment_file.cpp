#include "backend/plugin/mpi/mpi_segment_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace maniple::mpi_engine {
namespace {

std::string removed;  // written when the first group is made, read at exit

/// Of all that this process has mapped, so no other job's; and the very file, not another one of its name.
std::string mapped_segment(const std::string& local_rank) {
  std::ifstream maps("/proc/self/maps");
  for (std::string row; std::getline(maps, row);) {
    std::istringstream words(row);
    std::string range, rights, offset, device, path;
    ino_t inode = 0;
    words >> range >> rights >> offset >> device >> inode >> path;
    if (path.find("/vader_segment.") == std::string::npos || !path.ends_with("." + local_rank)) continue;
    struct stat file {};
    if (::stat(path.c_str(), &file) == 0 && file.st_ino == inode && file.st_uid == ::geteuid()) return path;
  }
  return {};
}

}  // namespace

void remove_segment_file() {
  const char* local_rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  if (local_rank == nullptr) return;
  const std::string path = mapped_segment(local_rank);
  if (!path.empty() && ::unlink(path.c_str()) == 0) removed = path;
}

void put_back_segment_file() {
  if (removed.empty()) return;
  const int file = ::open(removed.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (file >= 0) ::close(file);
}

}  // namespace maniple::mpi_engine
