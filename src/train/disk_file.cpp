#include "train/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include <openssl/evp.h>

#include "base/check.h"
#include "base/crypto.h"
#include "base/system_error.h"
#include "base/write_all.h"

namespace maniple {

bool is_readable(const std::string& path) noexcept { return ::access(path.c_str(), R_OK) == 0; }

RegularFile::RegularFile(std::string path)
    : path_(std::move(path)), fd_(open_file(path_, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) throw_system_error("cannot open " + path_);
  struct stat status = {};
  if (::fstat(fd_.get(), &status) != 0) throw_system_error("cannot look at " + path_);
  MANIPLE_REQUIRE(!S_ISDIR(status.st_mode), "{}: is a directory; expected a file", path_);
  MANIPLE_REQUIRE(S_ISREG(status.st_mode), "{}: is not a regular file", path_);
  size_ = static_cast<std::size_t>(status.st_size);
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
    done += static_cast<std::size_t>(got);
  }
}

namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

class Sha256 {
 public:
  Sha256() : context_(nullptr, MANIPLE_CRYPTO(EVP_MD_CTX_free)) {
    context_.reset(MANIPLE_CRYPTO(EVP_MD_CTX_new)());
    MANIPLE_ASSERT(context_ != nullptr &&
                   MANIPLE_CRYPTO(EVP_DigestInit_ex)(context_.get(), MANIPLE_CRYPTO(EVP_sha256)(), nullptr) == 1);
  }
  void add(const void* data, std::size_t bytes) {
    MANIPLE_ASSERT(MANIPLE_CRYPTO(EVP_DigestUpdate)(context_.get(), data, bytes) == 1);
  }
  std::string take() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> bytes;
    unsigned length = 0;
    MANIPLE_ASSERT(MANIPLE_CRYPTO(EVP_DigestFinal_ex)(context_.get(), bytes.data(), &length) == 1 && length == 32);
    std::string digits;
    for (unsigned i = 0; i < length; ++i) digits += format_text("{:02x}", bytes[i]);
    return digits;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace

struct DurableFile::Hash : Sha256 {};

DurableFile::DurableFile(std::string path) : path_(std::move(path)), hash_(std::make_unique<Hash>()) {
  fd_ = open_file(path_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (!fd_) throw_system_error("create " + path_);
}

DurableFile::~DurableFile() = default;

void DurableFile::write(const void* data, std::size_t bytes) {
  hash_->add(data, bytes);
  bytes_ += bytes;
  if (write_all(fd_.get(), {static_cast<const char*>(data), bytes}) != bytes) throw_system_error("write " + path_);
}

FileDigest DurableFile::finish() {
  if (::fsync(fd_.get()) != 0) throw_system_error("fsync " + path_);
  if (::close(fd_.release()) != 0 && errno != EINTR) throw_system_error("close " + path_);
  return {bytes_, hash_->take()};
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
