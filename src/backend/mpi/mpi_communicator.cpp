#include "backend/mpi/mpi_communicator.h"

#include "backend/mpi/mpi_aside.h"

#include <sched.h>
#include <time.h>

namespace maniple::mpi_engine {
namespace {

/// The ranks of MPI_COMM_WORLD behind the ranks of the group, told by the ranks themselves: the order need not be the same.
std::vector<int> meet(const CarrierContext& context, int own) {
  const auto key = [](int rank) { return "mpi/" + std::to_string(rank); };
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.size(); ++rank) keys.push_back(key(rank));
  context.store->set(key(context.rank), std::to_string(own));
  for (;;) {
    if (context.patrol->aborted()) throw Aborted("the group failed while it was set up");
    try {
      const Deadline turn = Deadline::sooner(context.deadline, Deadline::after(std::chrono::milliseconds(500)));
      std::vector<int> ranks;
      for (const std::string& text : context.store->multi_get(keys, turn)) ranks.push_back(std::stoi(text));
      return ranks;
    } catch (const Timeout&) {
      if (context.deadline.expired()) throw;
    }
  }
}

/// Communicators of ranks that make several at a time are told apart by it.
int tag_of(const std::string& group) {
  std::uint32_t hash = 2166136261u;
  for (const char c : group) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<int>(hash % 32749);
}

bool is_whole_world(const std::vector<int>& ranks, int size) {
  if (static_cast<int>(ranks.size()) != size) return false;
  for (int rank = 0; rank < size; ++rank) {
    if (ranks[static_cast<std::size_t>(rank)] != rank) return false;
  }
  return true;
}

/// Collective among the ranks, and MPI has no way to make it without blocking.
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

bool complete(MPI_Request& request, const Patrol& patrol, Deadline deadline) {
  constexpr auto kEager = std::chrono::microseconds(200);  // looked at without sleeping for so long
  constexpr int kLooks = 16;                               // between two looks at the clock
  const auto began = Deadline::Clock::now();
  for (int look = 1;; ++look) {
    int done = 0;
    {
      const auto call = Runtime::get().enter();
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    }
    if (done != 0) return true;
    if (patrol.aborted()) return false;
    if (look % kLooks == 0) {
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

Communicator::Communicator(const CarrierContext& context) {
  Runtime& runtime = Runtime::start(context);
  if (runtime.size() != context.world_size) {
    throw Unsupported("the mpi backend needs mpirun for all ranks: the job has " + std::to_string(context.world_size) +
                      ", mpirun started " + std::to_string(runtime.size()) + "; start with `mpirun -n " +
                      std::to_string(context.world_size) + " ./program`");
  }
  const std::vector<int> ranks = meet(context, runtime.rank());
  if (!(is_whole_world(ranks, runtime.size()) ? duplicate_world(context) : create_from(ranks, context))) {
    runtime.desert("setting up " + context.group + " was given up");
    throw Timeout("MPI did not make the communicator of " + context.group + " in time");
  }
  const auto call = runtime.enter();
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
}

bool Communicator::duplicate_world(const CarrierContext& context) {
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto call = Runtime::get().enter();
    check(MPI_Comm_idup(MPI_COMM_WORLD, &communicator_, &request), "MPI_Comm_idup");
  }
  return complete(request, *context.patrol, context.deadline);
}

bool Communicator::create_from(const std::vector<int>& ranks, const CarrierContext& context) {
  const auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  const auto body = [ranks, tag = tag_of(context.group), made] { *made = create(ranks, tag); };
  if (!run_aside(body, *context.patrol, context.deadline)) return false;
  communicator_ = *made;
  return true;
}

Communicator::~Communicator() {
  if (communicator_ == MPI_COMM_NULL || !Runtime::get().usable()) return;
  try {
    const auto call = Runtime::get().enter();
    MPI_Comm_free(&communicator_);
  } catch (const Error&) {
    // Deserted meanwhile.
  }
}

}  // namespace maniple::mpi_engine
