#include "plugins/mpi/mpi_communicator.h"

#include <sched.h>
#include <time.h>

#include <random>

#include "plugins/mpi/mpi_implementation.h"

namespace maniple::mpi_plugin {
namespace {

struct Members {
  std::vector<int> ranks;    // ranks in MPI_COMM_WORLD, by group rank; the two orders may differ
  std::uint64_t number = 0;  // unique number of the group
};

std::uint64_t new_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

/// Exchanges the members through the store.
Members exchange_members(const PluginContext& context, int own) {
  const auto key = [](int rank) { return "mpi/" + std::to_string(rank); };
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.size(); ++rank) keys.push_back(key(rank));
  context.store->set(key(context.rank), std::to_string(own) + " " + std::to_string(new_number()));
  for (;;) {
    if (context.abort->aborted()) throw Aborted("the group failed while it was set up");
    try {
      const Deadline limit = Deadline::sooner(context.deadline, Deadline::after(std::chrono::milliseconds(500)));
      Members members;
      const std::vector<std::string> texts = context.store->multi_get(keys, limit);
      for (const std::string& text : texts) members.ranks.push_back(std::stoi(text));
      members.number = std::stoull(texts.front().substr(texts.front().find(' ')));  // rank 0's number counts
      return members;
    } catch (const Timeout&) {
      if (context.deadline.expired()) throw;
    }
  }
}

/// Distinguishes communicators that ranks create at the same time.
int tag_of(const std::string& group) {
  std::uint32_t hash = 2166136261u;
  for (const char c : group) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<int>(hash % 32749);
}

/// The first tag of a group's channels; each traffic has one tag from there on. Tags differ between groups, because MPI
/// reuses communicator numbers, and a message that was never received in an earlier group must not arrive in this one.
int first_tag(std::uint64_t number) {
  int* limit = nullptr;
  int known = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &known);
  const int most = known != 0 ? *limit : 32767;
  return static_cast<int>(number % static_cast<std::uint64_t>(most / static_cast<int>(kTrafficCount))) *
         static_cast<int>(kTrafficCount);
}

bool is_whole_world(const std::vector<int>& ranks, int size) {
  if (static_cast<int>(ranks.size()) != size) return false;
  for (int rank = 0; rank < size; ++rank) {
    if (ranks[static_cast<std::size_t>(rank)] != rank) return false;
  }
  return true;
}

/// Collective over `ranks`. MPI offers only a blocking version.
MPI_Comm create(const std::vector<int>& ranks, int tag) {
  const auto call = Runtime::get().enter();
  MPI_Comm made = MPI_COMM_NULL;
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &members), "MPI_Group_incl");
  const int code = MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &made);
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  check(code, "MPI_Comm_create_group");
  return made;
}

}  // namespace

bool complete(MPI_Request& request, const AbortToken& abort, Deadline deadline) {
  // Poll without sleeping for this long. If ranks share cores, polling takes time from the awaited ranks.
  static const auto kEager = std::chrono::microseconds(shares_cores() ? 5 : 200);
  constexpr int kPolls = 16;  // between two reads of the clock
  const auto began = Deadline::Clock::now();
  for (int poll = 1;; ++poll) {
    int done = 0;
    {
      const auto call = Runtime::get().enter();
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    }
    if (done != 0) return true;
    if (abort.aborted()) return false;
    if (poll % kPolls == 0) {
      const auto now = Deadline::Clock::now();
      if (now >= deadline.when()) return false;
      if (now - began > kEager) {
        const timespec time{0, 20'000};
        ::nanosleep(&time, nullptr);  // sleep: MPI_Test has no wait with a limit
      }
    }
    ::sched_yield();
  }
}

Communicator::Communicator(const PluginContext& context) {
  Runtime& runtime = Runtime::start(context);
  runtime.watch(context.pids);
  if (runtime.size() != context.world_size) {
    throw Unsupported("the mpi backend needs mpirun for all ranks: the job has " + std::to_string(context.world_size) +
                      ", mpirun started " + std::to_string(runtime.size()) + "; start with `mpirun -n " +
                      std::to_string(context.world_size) + " ./program`");
  }
  const Members members = exchange_members(context, runtime.rank());
  peers_.emplace(members.number, context.rank, members.ranks);
  const bool whole = is_whole_world(members.ranks, runtime.size());
  if (!(whole ? duplicate_world(communicator_, context) : create_from(members.ranks, context)) ||
      !open_leave_notices(context)) {
    runtime.poison("call_context up " + context.group + " was given up");
    throw Timeout("MPI did not make the communicator of " + context.group + " in time");
  }
  const auto call = runtime.enter();
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  first_tag_ = first_tag(members.number);
}

Endpoint Communicator::endpoint(int rank, Traffic traffic) {
  return {communicator_, rank, first_tag_ + static_cast<int>(traffic), peers_->counters(rank),
          static_cast<std::size_t>(traffic)};
}

bool Communicator::duplicate_world(MPI_Comm& made, const PluginContext& context) {
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto call = Runtime::get().enter();
    check(MPI_Comm_idup(MPI_COMM_WORLD, &made, &request), "MPI_Comm_idup");
  }
  return complete(request, *context.abort, context.deadline);
}

// The first group of all ranks opens the communicator for notices; later groups find it open.
bool Communicator::open_leave_notices(const PluginContext& context) {
  LeaveNotices& notices = LeaveNotices::get();
  if (notices.open()) {
    notices.poll();  // notices of groups that were left long ago
    return true;
  }
  if (context.size() != context.world_size) return true;
  auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  if (!duplicate_world(*made, context)) {
    (void)made.release();  // MPI may still write there
    return false;
  }
  const auto call = Runtime::get().enter();
  MPI_Comm_set_errhandler(*made, MPI_ERRORS_RETURN);
  notices.open_with(*made);
  Runtime::get().all_have_started();
  return true;
}

bool Communicator::create_from(const std::vector<int>& ranks, const PluginContext& context) {
  const auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  const auto body = [ranks, tag = tag_of(context.group), made] { *made = create(ranks, tag); };
  if (!run_detached(body, *context.abort, context.deadline)) return false;
  communicator_ = *made;
  return true;
}

Communicator::~Communicator() {
  if (communicator_ == MPI_COMM_NULL || !Runtime::get().usable()) return;
  try {
    const auto call = Runtime::get().enter();
    MPI_Comm_free(&communicator_);
  } catch (const Error&) {
    // The runtime was poisoned meanwhile.
  }
}

}  // namespace maniple::mpi_plugin
