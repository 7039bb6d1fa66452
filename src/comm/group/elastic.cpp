#include "comm/group/elastic.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/group_impl.h"
#include "comm/group/make_world.h"
#include "comm/rendezvous/elastic_worker.h"
#include "comm/rendezvous/methods.h"
#include "comm/rendezvous/round.h"

namespace maniple {
namespace {

/// The first limit of a rendezvous. When it passes, the ranks look whether the launcher has formed another generation,
/// because a member died meanwhile, and otherwise go on. Ranks that try again meet all the same (round.h).
constexpr std::chrono::seconds kFirstLook{1};

/// The ranks that did not come to the rendezvous. Without rank 0, which serves the store, the others are unknown.
std::vector<int> missing_in(const Error& error, int own_rank) {
  if (!error.info().ranks.empty() || own_rank == 0) return error.info().ranks;
  return {0};
}

/// Waits for a generation after the worker's that it belongs to, and makes its world.
std::shared_ptr<ProcessGroup> join(ElasticWorker& worker, const InitOptions& options, Deadline deadline) {
  notify_init_started(0);
  std::uint32_t seen = worker.generation;
  for (;;) {
    {
      const WaitNotice notice(
          fmt::format("the launcher has not formed a group after generation {}; it waits for "
                      "workers (see --elastic)",
                      seen));
      if (!worker.page.await(seen, deadline)) {
        if (worker.page.ends()) throw Aborted("init: the launcher ends the job");
        throw Timeout(fmt::format("init: the launcher formed no group with this worker after generation {} in time",
                                  worker.generation),
                      {}, 0);
      }
    }
    const Membership member = worker.page.read(worker.worker);
    seen = member.generation;
    if (member.rank < 0) continue;
    const RankAssignment assignment{.rank = member.rank,
                                    .world_size = member.world_size,
                                    .host = member.host,
                                    .port = static_cast<std::uint16_t>(member.port)};
    const Deadline limit_of_members = Deadline::after(options.timeout);
    for (Seconds look = kFirstLook; worker.page.generation() == seen; look *= 2) {
      const Deadline soon = Deadline::after(std::min(look, std::max(options.timeout, Seconds(kFirstLook))));
      const Deadline limit = Deadline::sooner(deadline, soon);
      try {
        auto world = make_world(rendezvous_by_tcp(assignment, limit, seen), options, limit);
        worker.generation = seen;
        return world;
      } catch (const Error& error) {
        const ErrorKind kind = error.kind();
        const bool may_pass = kind == ErrorKind::timeout || kind == ErrorKind::peer_lost || kind == ErrorKind::aborted;
        if (!may_pass || deadline.expired() || worker.page.ends()) throw;
        log_debug("generation {} could not meet: {}", seen, error.what());
        if (kind == ErrorKind::timeout && limit_of_members.expired()) notify_lost(seen, missing_in(error, member.rank));
      }
    }
  }
}

ElasticWorker& worker_of(const ProcessGroup& world) {
  ElasticWorker* const worker = elastic_worker();
  MANIPLE_REQUIRE(worker != nullptr, "group {} is not the world of an elastic job (maniple run --elastic)",
                  world.name());
  return *worker;
}

}  // namespace

bool is_elastic() { return elastic_worker() != nullptr; }
bool is_detached(const ProcessGroup& group) { return const_cast<ProcessGroup&>(group).impl().is_detached(); }
bool has_next_generation() {
  const ElasticWorker* const worker = elastic_worker();
  return worker != nullptr && worker->page.generation() != worker->generation;
}
bool launcher_ends() {
  const ElasticWorker* const worker = elastic_worker();
  return worker == nullptr || worker->page.ends();
}
void announce_leaving() { notify_leaving(); }

std::shared_ptr<ProcessGroup> next_generation(const std::shared_ptr<ProcessGroup>& world, const std::vector<int>& lost,
                                              const std::string& reason) {
  ElasticWorker& worker = worker_of(*world);
  const GroupFacts& facts = world->impl().facts();
  if (!is_detached(*world)) {
    if (!world->error()) world->abort(reason);
    if (!lost.empty()) notify_lost(worker.generation, lost);
  }
  return join(
      worker,
      {.timeout = facts.timeout, .backend = facts.backend, .transport = facts.transport, .algorithm = facts.algorithm},
      Deadline::never());
}

std::shared_ptr<ProcessGroup> detail::init_elastic(const InitOptions& options, Deadline deadline) {
  ElasticWorker& worker = *elastic_worker();
  MANIPLE_REQUIRE(options.init_method == "env://" && options.rank == -1 && options.world_size == -1,
                  "init: the launcher of an elastic job (maniple run --elastic) assigns the ranks; leave init_method, "
                  "rank and world_size at their defaults");
  if (options.backend != "native") {
    throw Unsupported(
        fmt::format("init: backend {} in an elastic job (maniple run --elastic); only native can change "
                    "its members",
                    options.backend));
  }
  if (!worker.replaces) return join(worker, options, deadline);
  const RankAssignment assignment = assignment_from_environment(options);
  GroupFacts facts;
  facts.name = "world";
  facts.backend = options.backend;
  facts.timeout = options.timeout;
  facts.transport = options.transport;
  facts.algorithm = options.algorithm;
  facts.topology.rank = assignment.rank;
  facts.topology.nodes.emplace_back();
  for (int rank = 0; rank < assignment.world_size; ++rank) {
    facts.topology.members.push_back({.global_rank = rank, .node_rank = 0, .local_rank = rank, .host = {}});
    facts.topology.nodes.front().push_back(rank);
  }
  return std::make_shared<ProcessGroup>(std::make_unique<GroupImpl>(
      std::move(facts),
      std::make_exception_ptr(Unsupported(
          "this process replaces a worker that was lost, and joins the job in Trainer::fit(); before that, its group "
          "cannot communicate"))));
}

}  // namespace maniple
