#include "backend/plugin/mpi/mpi_leave_notices.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace maniple::mpi_engine {
namespace {

constexpr int kTag = 0;
// What was sent before a farewell may come after it. Some seconds later its sender is gone, and so are the bytes.
constexpr auto kOnItsWay = std::chrono::seconds(5);
constexpr auto kLook = std::chrono::microseconds(100);

struct Note {
  std::uint64_t group;
  std::array<std::uint64_t, kLanes> sent;
};

}  // namespace

void Line::check(std::size_t lane) const {
  if (!left.load(std::memory_order_acquire)) return;
  if (received[lane] < told[lane] && !limit.expired()) return;
  throw SystemError("it has left the group (it was destroyed there)", ECONNRESET);
}

Party::Party(std::uint64_t number, int rank, std::vector<int> world_ranks)
    : number_(number), rank_(rank), world_ranks_(std::move(world_ranks)), lines_(world_ranks_.size()) {
  Farewells& all = Farewells::get();
  const std::lock_guard lock(all.mutex_);
  all.parties_.emplace(number_, this);
}

Party::~Party() {
  Farewells& all = Farewells::get();
  const std::lock_guard lock(all.mutex_);
  all.parties_.erase(number_);
}

void Party::say_farewell() const {
  const MPI_Comm communicator = Farewells::get().communicator_.load();
  if (communicator == MPI_COMM_NULL) return;
  for (std::size_t rank = 0; rank < lines_.size(); ++rank) {
    if (static_cast<int>(rank) == rank_) continue;
    const Note note{number_, lines_[rank].sent};
    const auto packet = std::make_shared<Packet>(sizeof note);
    std::memcpy(packet->bytes.get(), &note, sizeof note);
    packet->owed = false;
    Runtime::get().send(packet, sizeof note, world_ranks_[rank], kTag, communicator);
    ++Farewells::get().due_;
  }
}

void Party::heard(int world_rank, const std::array<std::uint64_t, kLanes>& told) {
  const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
  if (found == world_ranks_.end()) return;
  Line& line = lines_[static_cast<std::size_t>(found - world_ranks_.begin())];
  if (line.left.load()) return;
  line.told = told;
  line.limit = Deadline::after(kOnItsWay);
  line.left.store(true, std::memory_order_release);
}

Farewells& Farewells::get() {
  static Farewells* const kAll = new Farewells();  // never destroyed: as the runtime
  return *kAll;
}

void Farewells::say_all() noexcept {
  try {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, party] : parties_) party->say_farewell();
  } catch (const std::exception&) {
    // They will notice at their deadlines.
  }
}

void Farewells::take_all(Deadline limit) noexcept {
  try {
    // sleep: between two looks, as MPI offers nothing to wait on that leaves the core to others
    for (look(); due_ > 0 && !limit.expired(); look()) std::this_thread::sleep_for(kLook);
  } catch (const std::exception&) {
    // It complains, then.
  }
}

void Farewells::look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !open()) return;
  const auto call = Runtime::get().enter();
  for (;;) {
    int come = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(MPI_ANY_SOURCE, kTag, communicator_.load(), &come, &message, &status), "MPI_Improbe");
    if (come == 0) return;
    Note note{};
    check(MPI_Mrecv(&note, sizeof note, MPI_BYTE, &message, &status), "MPI_Mrecv");
    --due_;
    // A group that is not here has been left here as well: all ranks know it before one of them can leave it.
    const auto party = parties_.find(note.group);
    if (party != parties_.end()) party->second->heard(status.MPI_SOURCE, note.sent);
  }
}

}  // namespace maniple::mpi_engine
