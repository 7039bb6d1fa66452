#include "train/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>
#include <utility>
#include <vector>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "train/sha256.h"

namespace maniple {

bool is_readable(const std::string& path) noexcept { return ::access(path.c_str(), R_OK) == 0; }

RegularFile::RegularFile(std::string path)
    : path_(std::move(path)), fd_(open_file(path_, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) throw_system_error("cannot open " + path_);
  struct stat status = {};
  if (::fstat(fd_.get(), &status) != 0) throw_system_error("cannot look at " + path_);
  MANIPLE_REQUIRE(!S_ISDIR(status.st_mode), "{}: is a directory; expected a file", path_);
  MANIPLE_REQUIRE(S_ISREG(status.st_mode), "{}: is not a regular file", path_);
  size_ = status.st_size;
}

void RegularFile::read(std::size_t offset, void* to, std::size_t count) const {
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got =
        ::pread(fd_.get(), static_cast<char*>(to) + done, count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error(format_text("cannot read {} at offset {}", path_, offset + done));
    MANIPLE_REQUIRE(got > 0,
                    "{}: ends at offset {}, but had {} bytes when it was opened; it must not change while it is in use",
                    path_, offset + done, size_);
    done += got;
  }
}

namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

std::string parent_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<std::size_t>(slash, 1));
}

const char* remedy_for(int code) {
  switch (code) {
    case ENOSPC:
    case EDQUOT: return "free space on its file system, or choose another folder";
    case EACCES:
    case EPERM:
    case EROFS: return "choose a folder that this user may write to";
    case ENOENT:
    case ENOTDIR: return "make its folder first";
    case EISDIR: return "a folder has this name; choose another one";
    case EFBIG: return "raise the limit of file sizes (ulimit -f), or choose a folder on another file system";
    default: return "choose a folder on another file system";
  }
}

}  // namespace

DurableFile::DurableFile(std::string path, Hash hash)
    : path_(std::move(path)), partial_(format_text("{}.partial-{}", path_, ::getpid())) {
  if (hash == Hash::sha256) hash_ = std::make_unique<Sha256>();
  ::unlink(partial_.c_str());  // left behind by an earlier process with this PID
  fd_ = open_file(partial_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (!fd_) fail("create");
}

DurableFile::~DurableFile() {
  if (!partial_.empty() && guard_.owned()) ::unlink(partial_.c_str());
}

void DurableFile::fail(const char* action) const {
  const int code = errno;
  throw SystemError(format_text("cannot {} {}: {}; {}", action, path_, errno_text(code), remedy_for(code)), code);
}

void DurableFile::write(const void* data, std::size_t bytes) {
  if (hash_) hash_->add(data, bytes);
  bytes_ += bytes;
  if (write_all(fd_.get(), {static_cast<const char*>(data), bytes}) != bytes) fail("write");
}

FileDigest DurableFile::sync() {
  if (::fsync(fd_.get()) != 0) fail("sync");
  if (::close(fd_.release()) != 0 && errno != EINTR) fail("close");
  return {bytes_, hash_ ? hash_->take() : std::string()};
}

void DurableFile::rename() {
  if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("give its name to");
  partial_.clear();
}

FileDigest DurableFile::finish() {
  FileDigest digest = sync();
  rename();
  return digest;
}

void DurableFile::publish(std::deque<DurableFile>& files) {
  for (DurableFile& file : files) file.rename();
  std::set<std::string> folders;
  for (const DurableFile& file : files) folders.insert(parent_of(file.path_));
  for (const std::string& folder : folders) sync_directory(folder);
}

FileDigest digest_of(const RegularFile& file) {
  Sha256 hash;
  std::vector<char> piece(std::min(kPieceBytes, file.size()));
  for (std::size_t at = 0; at < file.size();) {
    const std::size_t count = std::min(piece.size(), file.size() - at);
    file.read(at, piece.data(), count);
    hash.add(piece.data(), count);
    at += count;
  }
  return {file.size(), hash.take()};
}

void sync_parent(const std::string& path) { sync_directory(parent_of(path)); }

void sync_directory(const std::string& path) {
  const UniqueFd fd = open_file(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (!fd) throw_system_error("open " + path);
  if (::fsync(fd.get()) != 0) throw_system_error("fsync " + path);
}

std::string read_small_file(const std::string& path, std::size_t most_bytes) {
  const RegularFile file(path);
  if (file.size() > most_bytes) throw ProtocolError(format_text("{} is longer than {} bytes", path, most_bytes));
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace maniple
