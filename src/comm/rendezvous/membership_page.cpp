#include "comm/rendezvous/membership_page.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/shm/segment.h"
#include "comm/shm/waiter.h"

namespace maniple {
namespace {

constexpr std::uint32_t kMagic = 0x6d706c31;  // "1lpm"
constexpr std::size_t kHostWords = 64;
constexpr std::chrono::seconds kPause{1};  // of a worker that waits, between two polls at `ends`

}  // namespace

/// One writer. Readers copy the fields, and repeat that if `version` has changed meanwhile; it is odd during a write.
struct MembershipPage::Page {
  std::uint32_t magic;
  std::int32_t workers;
  std::atomic<std::uint32_t> version;
  std::atomic<std::uint32_t> generation;  // a futex; written last
  std::atomic<std::uint32_t> ends;
  std::atomic<std::int32_t> world_size;
  std::atomic<std::int32_t> port;
  std::atomic<std::uint32_t> host[kHostWords];

  /// One per worker; they follow this object in memory.
  std::atomic<std::int32_t>* ranks() noexcept { return reinterpret_cast<std::atomic<std::int32_t>*>(this + 1); }
  const std::atomic<std::int32_t>* ranks() const noexcept { return const_cast<Page*>(this)->ranks(); }

  static std::size_t bytes_for(int workers) {
    return sizeof(Page) + static_cast<std::size_t>(workers) * sizeof(std::atomic<std::int32_t>);
  }
};

MembershipPage::MembershipPage(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}
MembershipPage::MembershipPage(MembershipPage&&) noexcept = default;
MembershipPage::~MembershipPage() = default;

MembershipPage MembershipPage::create(int workers) {
  MembershipPage made(Segment::create(Page::bytes_for(workers)));
  Page& page = made.page();
  page.magic = kMagic;
  page.workers = workers;
  return made;
}

MembershipPage MembershipPage::map(UniqueFd fd) {
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0) throw_system_error("fstat of the page of members");
  const auto bytes = std::max(static_cast<std::size_t>(facts.st_size), Page::bytes_for(1));
  MembershipPage mapped(Segment::adopt(std::move(fd), bytes));
  const Page& page = mapped.page();
  if (page.magic != kMagic || page.workers < 1 || mapped.segment_->size() < Page::bytes_for(page.workers))
    throw ProtocolError("MANIPLE_MEMBERS_FD: the descriptor is not the launcher's page of members");
  return mapped;
}

MembershipPage::Page& MembershipPage::page() const noexcept { return *reinterpret_cast<Page*>(segment_->data()); }
int MembershipPage::fd() const noexcept { return segment_->fd(); }
int MembershipPage::workers() const noexcept { return page().workers; }
std::uint32_t MembershipPage::generation() const noexcept { return page().generation.load(std::memory_order_acquire); }
bool MembershipPage::ends() const noexcept { return page().ends.load() != 0; }
void MembershipPage::announce_end() noexcept { page().ends.store(1); }

void MembershipPage::publish(std::uint32_t generation, int world_size, std::string_view host, int port,
                             std::span<const int> ranks) {
  Page& page = this->page();
  MANIPLE_ASSERT(host.size() < sizeof page.host && ranks.size() == static_cast<std::size_t>(page.workers));
  std::uint32_t words[kHostWords] = {};
  std::memcpy(words, host.data(), host.size());
  page.version.fetch_add(1);
  page.world_size.store(world_size);
  page.port.store(port);
  for (std::size_t i = 0; i < kHostWords; ++i) page.host[i].store(words[i]);
  for (std::size_t i = 0; i < ranks.size(); ++i) page.ranks()[i].store(ranks[i]);
  page.generation.store(generation);
  page.version.fetch_add(1);
  futex_wake_all(page.generation);
}

Membership MembershipPage::read(int worker) const {
  const Page& page = this->page();
  MANIPLE_REQUIRE(worker >= 0 && worker < page.workers, "worker {} of a node with {}", worker, page.workers);
  for (;;) {
    const std::uint32_t version = page.version.load();
    Membership membership{.generation = page.generation.load(),
                          .rank = page.ranks()[worker].load(),
                          .world_size = page.world_size.load(),
                          .port = page.port.load()};
    std::uint32_t words[kHostWords];
    for (std::size_t i = 0; i < kHostWords; ++i) words[i] = page.host[i].load();
    if (version % 2 != 0 || page.version.load() != version) continue;  // a write takes microseconds
    char host[sizeof words];
    std::memcpy(host, words, sizeof words);
    membership.host.assign(host, ::strnlen(host, sizeof host));
    return membership;
  }
}

bool MembershipPage::await(std::uint32_t generation, Deadline deadline) const {
  const Page& page = this->page();
  while (page.generation.load(std::memory_order_acquire) <= generation) {
    if (deadline.expired() || ends()) return false;
    const std::uint32_t seen = page.generation.load();
    if (seen <= generation) futex_wait(page.generation, seen, Deadline::sooner(deadline, Deadline::after(kPause)));
  }
  return true;
}

}  // namespace maniple
