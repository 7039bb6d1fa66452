#include "plugins/cuda/control_page.h"

#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

#include "plugins/cuda/driver.h"

namespace maniple::cuda_plugin {
namespace {

constexpr std::size_t kPageBytes = 8192;
constexpr std::uint64_t kCallsKept = 256;  // per rank
static_assert(sizeof(HostRecord) * kMostRanks <= kPageBytes);

[[noreturn]] void fail(const char* call) {
  throw SystemError(std::string(call) + " for a page shared by ranks: " + std::strerror(errno), errno);
}

}  // namespace

ControlPage::ControlPage(DescriptorExchange& descriptors, int rank, int ranks, Deadline deadline)
    : rank_(rank),
      ranks_(ranks),
      bytes_(kPageBytes + ranks * (kFlagsBytes + kCallsKept * sizeof(CallRecord))),
      compared_(ranks, 0) {
  int descriptor = -1;
  if (rank == 0) {
    descriptor = ::memfd_create("maniple-cuda", MFD_CLOEXEC);
    if (descriptor < 0) fail("memfd_create");
    if (::ftruncate(descriptor, static_cast<off_t>(bytes_)) != 0) {
      ::close(descriptor);
      fail("ftruncate");
    }
  }
  try {
    const int theirs = descriptors.share("cuda/control", 0, descriptor, deadline);
    if (rank != 0) descriptor = theirs;
  } catch (...) {
    if (descriptor >= 0) ::close(descriptor);
    throw;
  }
  void* const page = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (page == MAP_FAILED) fail("mmap");
  records_ = static_cast<HostRecord*>(page);
  try {
    check(::cudaHostRegister(page, bytes_, cudaHostRegisterMapped | cudaHostRegisterPortable), "cudaHostRegister");
    void* address = nullptr;
    check(::cudaHostGetDevicePointer(&address, page, 0), "cudaHostGetDevicePointer");
    device_records_ = static_cast<HostRecord*>(address);
  } catch (...) {
    ::munmap(page, bytes_);
    throw;
  }
}

ControlPage::~ControlPage() {
  ::cudaHostUnregister(records_);
  ::munmap(records_, bytes_);
}

Flags* ControlPage::flags(int rank) const noexcept {
  return reinterpret_cast<Flags*>(reinterpret_cast<std::byte*>(records_) + kPageBytes + rank * kFlagsBytes);
}

Flags* ControlPage::flags_on_device(int rank) const noexcept {
  return reinterpret_cast<Flags*>(reinterpret_cast<std::byte*>(device_records_) + kPageBytes + rank * kFlagsBytes);
}

ControlPage::CallRecord& ControlPage::call(int rank, std::uint64_t number) const noexcept {
  auto* const first = reinterpret_cast<CallRecord*>(flags(ranks_));  // after the last rank's flags
  return first[static_cast<std::uint64_t>(rank) * kCallsKept + number % kCallsKept];
}

void ControlPage::stop(int rank, StopReason reason) noexcept {
  std::uint32_t expected = kRunning;
  __atomic_compare_exchange_n(&records_[rank].stop, &expected, static_cast<std::uint32_t>(reason), false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

StopReason ControlPage::stopped() const noexcept {
  return static_cast<StopReason>(__atomic_load_n(&records_[rank_].stop, __ATOMIC_SEQ_CST));
}

std::vector<int> ControlPage::not_called(std::uint64_t seq, bool& led) const {
  std::vector<int> ranks;
  for (std::uint64_t place = 0; place < kCallsKept; ++place) {
    const CallRecord& mine = call(rank_, place);
    const std::uint64_t number = mine.number.load();
    if (number == 0 || mine.seq.load() != seq) continue;
    led = mine.led.load() != 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (call(rank, place).number.load() < number) ranks.push_back(rank);
    }
    break;
  }
  return ranks;
}

void ControlPage::note_call(std::uint64_t hash, std::uint64_t seq, bool led) noexcept {
  CallRecord& record = call(rank_, ++calls_);
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.hash.store(hash, std::memory_order_relaxed);
  record.seq.store(seq, std::memory_order_relaxed);
  record.led.store(led ? 1 : 0, std::memory_order_relaxed);
  record.number.store(calls_, std::memory_order_release);
}

std::uint64_t ControlPage::find_mismatch(bool& found) noexcept {
  found = true;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (__atomic_load_n(&records_[rank].mismatch, __ATOMIC_ACQUIRE) != 0) return records_[rank].seq;
  }
  const MutexLock lock(mutex_);
  for (int rank = 0; rank < ranks_; ++rank) {
    while (rank != rank_) {
      const std::uint64_t number = compared_[rank] + 1;
      const CallRecord& mine = call(rank_, number);
      const CallRecord& theirs = call(rank, number);
      const std::uint64_t my_number = mine.number.load(std::memory_order_acquire);
      const std::uint64_t their_number = theirs.number.load(std::memory_order_acquire);
      if (my_number < number || their_number < number) break;  // not called yet
      const bool same = mine.hash.load() == theirs.hash.load();
      const std::uint64_t seq = mine.seq.load();
      std::atomic_thread_fence(std::memory_order_acquire);
      const bool kept = mine.number.load() == number && theirs.number.load() == number;  // not overwritten meanwhile
      if (kept && !same) return seq;
      ++compared_[rank];
    }
  }
  found = false;
  return 0;
}

}  // namespace maniple::cuda_plugin
