#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <fmt/format.h>

#include "base/check.h"
#include "base/system_error.h"

namespace maniple {

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  UniqueFd fd(::memfd_create("maniple", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system_error("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_system_error(fmt::format("{} bytes of shared memory", bytes));
  }
  // Whoever receives the descriptor can rely on the size: a peer cannot shrink the file under our feet (SIGBUS).
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

std::shared_ptr<Segment> Segment::adopt(UniqueFd fd, std::size_t bytes) {
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0) throw_system_error("fstat of shared memory");
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (static_cast<std::size_t>(facts.st_size) < bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw ProtocolError(
        fmt::format("shared memory of {} sealed bytes expected, got a file of {}", bytes, facts.st_size));
  }
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

Segment::Segment(UniqueFd fd, std::size_t bytes) : fd_(std::move(fd)), size_(bytes) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) throw_system_error(fmt::format("mapping {} bytes of shared memory", bytes));
  ::madvise(mapped, bytes, MADV_HUGEPAGE);  // advice; refused on kernels without huge shared pages
  ::madvise(mapped, bytes, MADV_DONTFORK);  // a forked child is not a rank
  data_ = static_cast<std::byte*>(mapped);
}

Segment::~Segment() { ::munmap(data_, size_); }

void Segment::populate(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  const int code = ::posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (code != 0) throw_system_error(fmt::format("{} bytes of shared memory", bytes), code);
}

std::size_t round_to_huge_page(std::size_t bytes) noexcept {
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  return (bytes + kHuge - 1) / kHuge * kHuge;
}

}  // namespace maniple
