#include "plugins/mpi/mpi_channel.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace maniple::mpi_plugin {
namespace {

constexpr int kNoticeTag = 0;
// Bytes sent before a notice may arrive after it. Some seconds later the sender is gone, and bytes still missing are
// lost.
constexpr auto kInTransit = std::chrono::seconds(5);
constexpr auto kPollInterval = std::chrono::microseconds(100);

struct Notice {
  std::uint64_t group;
  std::array<std::uint64_t, kTrafficCount> sent;
};

constexpr std::size_t kPackets = 4;
constexpr int kPollsPerNotice = 64;  // empty polls of a channel between two polls for notices: some milliseconds

/// Counts a channel's empty polls, and receives leave notices after every kPollsPerNotice of them.
class EmptyPolls {
 public:
  void reset() noexcept { count_ = 0; }
  void add(const Endpoint& endpoint) {
    if (++count_ % kPollsPerNotice == 0) LeaveNotices::get().poll();
    endpoint.counters.check(endpoint.traffic);
  }

 private:
  int count_ = 0;
};

class Sink final : public ByteSink {
 public:
  explicit Sink(const Endpoint& endpoint) : endpoint_(endpoint) {
    for (auto& packet : packets_) packet = std::make_shared<Packet>();
  }

  std::size_t write_some(std::span<const iovec> parts) override {
    endpoint_.counters.check(endpoint_.traffic);
    Packet& packet = *packets_[next_];
    if (packet.in_transit.load(std::memory_order_acquire)) {
      Runtime::get().sweep();
      if (packet.in_transit.load(std::memory_order_acquire)) {
        empty_polls_.add(endpoint_);
        return 0;
      }
    }
    std::size_t size = 0;
    for (const iovec& part : parts) {
      const std::size_t take = std::min(part.iov_len, Packet::kBytes - size);
      if (take > 0) std::memcpy(packet.bytes.get() + size, part.iov_base, take);
      size += take;
    }
    if (size == 0) return 0;
    Runtime::get().send(packets_[next_], size, endpoint_.peer, endpoint_.tag, endpoint_.communicator);
    endpoint_.counters.sent[endpoint_.traffic] += size;
    empty_polls_.reset();
    next_ = (next_ + 1) % kPackets;
    return size;
  }
  int fd() const noexcept override { return -1; }

 private:
  Endpoint endpoint_;
  EmptyPolls empty_polls_;
  std::array<std::shared_ptr<Packet>, kPackets> packets_;
  std::size_t next_ = 0;
};

class Source final : public ByteSource {
 public:
  explicit Source(const Endpoint& endpoint) : endpoint_(endpoint) {}
  ~Source() override {
    if (receiving_) Runtime::get().keep(packet_);
  }

  std::size_t read_some(std::span<const iovec> parts) override {
    if (used_ == size_ && !receive()) {
      empty_polls_.add(endpoint_);
      return 0;
    }
    std::size_t moved = 0;
    for (const iovec& part : parts) {
      const std::size_t take = std::min(part.iov_len, size_ - used_);
      if (take > 0) std::memcpy(part.iov_base, packet_->bytes.get() + used_, take);
      used_ += take;
      moved += take;
    }
    return moved;
  }
  int fd() const noexcept override { return -1; }

 private:
  // Receives only packets that have arrived, so no posted receive must be cancelled when the group ends.
  bool receive() {
    const auto call = Runtime::get().enter();
    if (!receiving_) {
      int arrived = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check(MPI_Improbe(endpoint_.peer, endpoint_.tag, endpoint_.communicator, &arrived, &message, &status),
            "MPI_Improbe");
      if (arrived == 0) return false;
      int size = 0;
      MPI_Get_count(&status, MPI_BYTE, &size);
      if (size <= 0 || static_cast<std::size_t>(size) > Packet::kBytes)
        throw ProtocolError("an MPI packet of impossible length");
      expected_ = static_cast<std::size_t>(size);
      check(MPI_Imrecv(packet_->bytes.get(), size, MPI_BYTE, &message, &packet_->request), "MPI_Imrecv");
      receiving_ = true;
    }
    int done = 0;
    check(MPI_Test(&packet_->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) return false;
    receiving_ = false;
    endpoint_.counters.received[endpoint_.traffic] += expected_;
    empty_polls_.reset();
    size_ = expected_;
    used_ = 0;
    return true;
  }

  Endpoint endpoint_;
  EmptyPolls empty_polls_;
  std::shared_ptr<Packet> packet_ = std::make_shared<Packet>();
  bool receiving_ = false;
  std::size_t expected_ = 0;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
};

}  // namespace

void PeerCounters::check(std::size_t traffic) const {
  if (!left.load(std::memory_order_acquire)) return;
  if (received[traffic] < announced[traffic] && !limit.expired()) return;
  throw_left("it has left the group (it was destroyed there)", ECONNRESET);
}

GroupPeers::GroupPeers(std::uint64_t number, int rank, std::vector<int> world_ranks)
    : number_(number), rank_(rank), world_ranks_(std::move(world_ranks)), counters_(world_ranks_.size()) {
  LeaveNotices& all = LeaveNotices::get();
  const MutexLock lock(all.mutex_);
  all.groups_.emplace(number_, this);
}

GroupPeers::~GroupPeers() {
  LeaveNotices& all = LeaveNotices::get();
  const MutexLock lock(all.mutex_);
  all.groups_.erase(number_);
}

void GroupPeers::send_leave_notices() const {
  const MPI_Comm communicator = LeaveNotices::get().communicator_.load();
  if (communicator == MPI_COMM_NULL) return;
  for (std::size_t rank = 0; rank < counters_.size(); ++rank) {
    if (static_cast<int>(rank) == rank_) continue;
    const Notice notice{number_, counters_[rank].sent};
    const auto packet = std::make_shared<Packet>(sizeof notice);
    std::memcpy(packet->bytes.get(), &notice, sizeof notice);
    packet->awaited = false;
    Runtime::get().send(packet, sizeof notice, world_ranks_[rank], kNoticeTag, communicator);
    ++LeaveNotices::get().due_;
  }
}

void GroupPeers::on_notice(int world_rank, const std::array<std::uint64_t, kTrafficCount>& announced) {
  const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
  if (found == world_ranks_.end()) return;
  PeerCounters& counters = counters_[static_cast<std::size_t>(found - world_ranks_.begin())];
  if (counters.left.load()) return;
  counters.announced = announced;
  counters.limit = Deadline::after(kInTransit);
  counters.left.store(true, std::memory_order_release);
}

LeaveNotices& LeaveNotices::get() {
  static LeaveNotices* const kAll = new LeaveNotices();  // never destroyed, like the runtime
  return *kAll;
}

void LeaveNotices::send_all() noexcept {
  try {
    const MutexLock lock(mutex_);
    for (const auto& [number, group] : groups_) group->send_leave_notices();
  } catch (const std::exception&) {
    // The other ranks get their errors at their deadlines instead.
  }
}

void LeaveNotices::receive_all(Deadline limit) noexcept {
  try {
    // sleep: between two polls, because MPI's waits spin
    for (poll(); due_ > 0 && !limit.expired(); poll()) std::this_thread::sleep_for(kPollInterval);
  } catch (const std::exception&) {
    // MPICH may then warn about messages not received.
  }
}

void LeaveNotices::poll() {
  if (!mutex_.try_lock()) return;
  const MutexLock lock(mutex_, std::adopt_lock);
  if (!open()) return;
  const auto call = Runtime::get().enter();
  for (;;) {
    int arrived = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(MPI_ANY_SOURCE, kNoticeTag, communicator_.load(), &arrived, &message, &status), "MPI_Improbe");
    if (arrived == 0) return;
    Notice notice{};
    check(MPI_Mrecv(&notice, sizeof notice, MPI_BYTE, &message, &status), "MPI_Mrecv");
    --due_;
    // This rank has left a group it does not find: all ranks register a group before one of them can leave it.
    const auto group = groups_.find(notice.group);
    if (group != groups_.end()) group->second->on_notice(status.MPI_SOURCE, notice.sent);
  }
}

std::unique_ptr<ByteSink> make_sink(const Endpoint& endpoint) { return std::make_unique<Sink>(endpoint); }
std::unique_ptr<ByteSource> make_source(const Endpoint& endpoint) { return std::make_unique<Source>(endpoint); }

}  // namespace maniple::mpi_plugin
