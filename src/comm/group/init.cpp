// Creates groups: init() makes the world's group, new_group() and split() make others from it.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include <fmt/format.h>

#include "comm/backend/plugin/load.h"
#include "comm/backend/plugin/mpirun.h"
#include "comm/base/check.h"
#include "comm/base/crash_trace.h"
#include "comm/base/environment.h"
#include "comm/base/error_codec.h"
#include "comm/base/log.h"
#include "comm/collective/algorithms.h"
#include "comm/group/elastic.h"
#include "comm/group/environment_check.h"
#include "comm/group/group_impl.h"
#include "comm/group/make_world.h"
#include "comm/group/named_groups.h"
#include "comm/group/validate.h"
#include "comm/rendezvous/methods.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/session/session.h"
#include <maniple/comm/topology.h>

namespace maniple {
namespace {

constexpr Seconds kInitTimeout = std::chrono::minutes(5);  // default

/// Derives a group's topology from the session's peer table. `global_ranks` is in group order and includes the
/// session's rank.
Topology topology_of(const Session& session, const std::vector<int>& global_ranks) {
  Topology topology;
  std::map<std::string, int> nodes;
  for (std::size_t r = 0; r < global_ranks.size(); ++r) {
    const PeerInfo& peer = session.peer(global_ranks[r]);
    const auto [it, fresh] = nodes.emplace(peer.host_key, static_cast<int>(nodes.size()));
    if (fresh) topology.nodes.emplace_back();
    auto& node = topology.nodes[it->second];
    topology.members.push_back({global_ranks[r], it->second, static_cast<int>(node.size()), peer.host_name, peer.pid});
    node.push_back(static_cast<int>(r));
    if (global_ranks[r] == session.rank()) topology.rank = static_cast<int>(r);
  }
  return topology;
}

}  // namespace

std::shared_ptr<ProcessGroup> make_world(RendezvousResult result, const InitOptions& options, Deadline deadline,
                                         const std::string& name) {
  GroupFacts facts;
  facts.name = name;
  facts.backend = options.backend;
  facts.device = options.device;
  facts.timeout = options.timeout;
  facts.transport = options.transport;
  if (facts.transport == TransportKind::automatic) facts.transport = parse_transport(knob_word(Knob::transport));
  facts.algorithm = options.algorithm.empty() ? knob_text(Knob::algorithm) : options.algorithm;
  ChosenSettings chosen;
  chosen.backend = facts.backend;
  chosen.knobs[Knob::transport] = to_string(facts.transport);
  chosen.knobs[Knob::algorithm] = facts.algorithm;
  if (facts.backend == "mpi") chosen.knobs[Knob::mpi] = chosen_mpi();
  facts.session = Session::start(std::move(result), facts.transport, chosen, deadline);
  std::vector<int> everyone(facts.session->world_size());
  std::iota(everyone.begin(), everyone.end(), 0);
  facts.topology = topology_of(*facts.session, everyone);
  auto world = std::make_shared<ProcessGroup>(std::make_unique<detail::GroupImpl>(std::move(facts), deadline));
  notify_init_done();
  return world;
}

namespace {

// Checks that need no other rank.
Deadline check(const InitOptions& options) {
  check_environment(options);
  install_crash_trace();
  MANIPLE_REQUIRE(options.timeout.count() > 0, "timeout is {} s; it must be positive", options.timeout.count());
  MANIPLE_REQUIRE(!options.init_timeout || options.init_timeout->count() > 0,
                  "init_timeout is {} s; it must be positive", options.init_timeout->count());
  require_transport(options.transport);
  MANIPLE_REQUIRE(
      options.backend != "tcp" && options.backend != "shm",
      "backend \"{}\": it is a transport of the backend native now; write .backend = \"native\", .transport = "
      "maniple::TransportKind::{}",
      options.backend, options.backend);
  parse_backend(options.backend);
  // A world of one may have called MPI_Init itself, without mpirun; the plugin checks that.
  const int size =
      options.world_size > 0 ? options.world_size : std::atoi(environment_text("WORLD_SIZE").value_or("0").c_str());
  if (options.backend == "mpi" && size != 1 && !started_by_mpirun()) throw Unsupported(needs_mpirun(size));
  require_algorithm(options.algorithm);
  return Deadline::after(options.init_timeout.value_or(std::min(options.timeout, kInitTimeout)));
}

// The program supplied the store, so every process with access belongs to the job: the store can carry the secret.
Secret secret_from(Store& store) {
  const Secret fresh = Secret::random();
  const std::string bytes(fresh.bytes.begin(), fresh.bytes.end());
  const std::string chosen = store.compare_set("maniple/secret", "", bytes);
  if (chosen.size() != fresh.bytes.size()) throw ProtocolError("the store's key maniple/secret holds something else");
  Secret secret;
  std::copy(chosen.begin(), chosen.end(), secret.bytes.begin());
  return secret;
}

/// Fills in the secret and the address of `result` if they are missing.
std::shared_ptr<ProcessGroup> init_with(std::shared_ptr<Store> store, const InitOptions& options, Deadline deadline,
                                        RendezvousResult result = {}, const std::string& name = "world") {
  MANIPLE_REQUIRE(store != nullptr, "init: no store was given");
  MANIPLE_REQUIRE(options.world_size >= 1, "init: world_size is {}; it must be given with a store", options.world_size);
  MANIPLE_REQUIRE(options.rank >= 0 && options.rank < options.world_size, "init: rank {} in a world of {}",
                  options.rank, options.world_size);
  notify_init_started(options.world_size);
  if (result.identity.secret.is_none()) result.identity.secret = secret_from(*store);
  result.identity.rank = options.rank;
  result.identity.world_size = options.world_size;
  const Address master = result.data_address.length() != 0 ? result.data_address : Address::parse("127.0.0.1:0");
  result.data_address = choose_data_address(master);
  result.store = std::move(store);
  return make_world(std::move(result), options, deadline, name);
}

// A process that cannot start usually ends, so report the reason to its launcher.
template <class Body>
std::shared_ptr<ProcessGroup> reporting(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    report_failure(error.info());
    throw;
  }
}

}  // namespace

std::shared_ptr<ProcessGroup> init(const InitOptions& options) {
  return reporting([&] {
    const Deadline deadline = check(options);
    if (has_no_launcher(options)) {
      log_warning(
          "init: no launcher has set RANK and WORLD_SIZE, so this process is a world of one rank; start several with "
          "`maniple run`");
      InitOptions alone = options;
      alone.rank = 0;
      alone.world_size = 1;
      return init_with(make_memory_store(), alone, deadline);
    }
    if (is_elastic()) return detail::init_elastic(options, deadline);
    notify_init_started(options.world_size);
    return make_world(rendezvous(options, deadline), options, deadline);
  });
}

std::shared_ptr<ProcessGroup> init(std::shared_ptr<Store> store, const InitOptions& options) {
  return reporting([&] { return init_with(std::move(store), options, check(options)); });
}

std::shared_ptr<ProcessGroup> init_named(std::shared_ptr<Store> store, const InitOptions& options,
                                         const std::string& name, const std::string& master) {
  return reporting([&] {
    const Deadline deadline = check(options);
    MANIPLE_REQUIRE(options.world_size >= 1 && options.rank >= 0 && options.rank < options.world_size,
                    "init: rank {} in a world of {}", options.rank, options.world_size);
    RendezvousResult result;
    result.identity = identity_from_environment(options.rank, options.world_size);
    if (!master.empty()) result.data_address = Address::resolve(master, 0, deadline).front();
    auto registered = register_rank(std::move(store), result.identity);
    return init_with(std::move(registered), options, deadline, std::move(result), name);
  });
}

namespace {

std::shared_ptr<ProcessGroup> make_group(detail::GroupImpl& parent, const std::string& name,
                                         const std::vector<int>& ranks, const GroupOptions& options,
                                         Deadline deadline) {
  GroupFacts facts = parent.facts();
  facts.name = name;
  std::vector<int> global_ranks;
  for (const int rank : ranks) global_ranks.push_back(parent.facts().topology.members[rank].global_rank);
  facts.topology = topology_of(*facts.session, global_ranks);
  facts.timeout = options.timeout.value_or(facts.timeout);
  facts.transport = options.transport.value_or(facts.transport);
  facts.algorithm = options.algorithm.value_or(facts.algorithm);
  return std::make_shared<ProcessGroup>(std::make_unique<detail::GroupImpl>(std::move(facts), deadline));
}

std::shared_ptr<ProcessGroup> make_outside(const detail::GroupImpl& parent, const std::string& name) {
  GroupFacts facts = parent.facts();
  facts.name = name;
  facts.session->skip_group(name);
  return std::make_shared<ProcessGroup>(std::make_unique<detail::GroupImpl>(std::move(facts)));
}

// Ranks compare their arguments before they validate them, so either all refuse them or none.
std::vector<std::size_t> words_of(const GroupOptions& options) {
  std::vector<std::size_t> words = {options.timeout.has_value(), 0,
                                    options.transport ? 1 + static_cast<std::size_t>(*options.transport) : 0,
                                    options.algorithm ? 1 + options.algorithm->size() : 0};
  if (options.timeout) words[1] = std::bit_cast<std::uint64_t>(options.timeout->count());
  if (options.algorithm) words.insert(words.end(), options.algorithm->begin(), options.algorithm->end());
  return words;
}

void require_good(const GroupOptions& options, const char* operation) {
  MANIPLE_REQUIRE(!options.timeout || options.timeout->count() > 0, "{}: timeout is {} s; it must be positive",
                  operation, options.timeout->count());
  if (options.transport) require_transport(*options.transport);
  if (options.algorithm) require_algorithm(*options.algorithm);
}

void require_distinct(std::span<const int> ranks, int size) {
  MANIPLE_REQUIRE(!ranks.empty(), "new_group: no ranks");
  std::set<int> seen;
  for (const int rank : ranks) {
    MANIPLE_REQUIRE(rank >= 0 && rank < size, "new_group: rank {} in a group of {} ranks", rank, size);
    MANIPLE_REQUIRE(seen.insert(rank).second, "new_group: rank {} is listed twice", rank);
  }
}

bool has(std::span<const int> ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

}  // namespace

std::shared_ptr<ProcessGroup> make_named_group(ProcessGroup& parent, const std::string& name,
                                               std::span<const int> ranks, const GroupOptions& options) {
  parent.require_member("new_group");
  require_distinct(ranks, parent.size());
  MANIPLE_REQUIRE(has(ranks, parent.rank()), "new_group: rank {} is not among the ranks of group {}", parent.rank(),
                  name);
  require_good(options, "new_group");
  detail::GroupImpl& impl = parent.impl();
  const Deadline deadline = Deadline::after(options.timeout.value_or(impl.facts().timeout));
  return make_group(impl, name, {ranks.begin(), ranks.end()}, options, deadline);
}

std::shared_ptr<ProcessGroup> ProcessGroup::new_group(std::span<const int> ranks, const GroupOptions& options,
                                                      const CallOptions& call_options, const SourceLocation& where) {
  const CallOptions call = called_at(call_options, where);
  require_member("new_group");
  const Deadline deadline = Deadline::after(impl_->limit(call));
  // A barrier whose "counts" are the list and the options: ranks that pass different values get a Mismatch.
  std::vector<std::size_t> given = words_of(options);
  given.insert(given.end(), ranks.begin(), ranks.end());
  Operation agree = barrier_operation(call);
  agree.parts = Parts(given);
  impl_->run_now(agree, call);
  require_distinct(ranks, size());
  require_good(options, "new_group");
  const std::string name = fmt::format("{}/{}", impl_->facts().name, impl_->next_group());
  if (!has(ranks, rank())) return make_outside(*impl_, name);
  return make_group(*impl_, name, {ranks.begin(), ranks.end()}, options, deadline);
}

std::shared_ptr<ProcessGroup> ProcessGroup::split(int color, int key, const GroupOptions& options,
                                                  const CallOptions& call_options, const SourceLocation& where) {
  const CallOptions call = called_at(call_options, where);
  require_member("split");
  const Deadline deadline = Deadline::after(impl_->limit(call));
  const std::int64_t mine[3] = {color, key, static_cast<std::int64_t>(Parts(words_of(options)).hash())};
  std::vector<std::int64_t> all(3 * size());
  Operation exchange = all_gather_operation({rank(), size()}, buffer_of(std::span(mine)), buffer_of(all), {}, call);
  impl_->run_now(exchange, call);
  const std::string name = fmt::format("{}/{}.{}", impl_->facts().name, impl_->next_group(), color);
  if (color < 0) {
    require_good(options, "split");
    return make_outside(*impl_, name);
  }
  std::vector<std::pair<std::int64_t, int>> chosen;  // (key, rank)
  bool agreed = true;
  for (int r = 0; r < size(); ++r) {
    const int at = 3 * r;
    if (all[at] != color) continue;
    chosen.emplace_back(all[at + 1], r);
    agreed = agreed && all[at + 2] == mine[2];
  }
  MANIPLE_REQUIRE(agreed, "split: the ranks of colour {} were given different options; all pass the same", color);
  require_good(options, "split");
  std::sort(chosen.begin(), chosen.end());
  std::vector<int> ranks;
  for (const auto& [k, r] : chosen) ranks.push_back(r);
  return make_group(*impl_, name, ranks, options, deadline);
}

namespace {

/// Whether another attempt with fewer ranks may succeed.
bool may_shrink_further(const Error& error) {
  return error.kind() == ErrorKind::peer_lost || error.kind() == ErrorKind::aborted;
}

}  // namespace

std::shared_ptr<ProcessGroup> ProcessGroup::shrink(const GroupOptions& options, const CallOptions& call_options,
                                                   const SourceLocation& where) {
  const CallOptions call = called_at(call_options, where);
  require_member("shrink");
  require_good(options, "shrink");
  const GroupFacts& facts = impl_->facts();
  if (facts.backend != "native") {
    throw Unsupported(
        fmt::format("shrink: group {} has the backend {}; only native groups can shrink", facts.name, facts.backend));
  }
  if (impl_->is_detached()) std::rethrow_exception(impl_->abort_signal().cause());
  const Deadline deadline = Deadline::after(impl_->limit(call));
  if (!impl_->abort_signal().raised()) abort(fmt::format("rank {} called shrink()", rank()));
  detector::Shrink request{.rank = facts.session->rank(), .seq = impl_->last_shrink(), .group = facts.name};
  for (const auto& member : facts.topology.members) request.members.push_back(member.global_rank);
  MANIPLE_REQUIRE(request.members.size() <= detector::kMaxMembers,
                  "shrink: a group of {} ranks; at most {} are possible", request.members.size(),
                  detector::kMaxMembers);
  const auto make = [&](const detector::Survivors& decision) {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (has(decision.members, request.members[r])) ranks.push_back(r);
    }
    impl_->set_last_shrink(decision.seq);
    return make_group(*impl_, fmt::format("{}/survivors-{}", facts.name, decision.seq), ranks, options, deadline);
  };
  // Threads of one process end together, so all are survivors.
  if (!facts.session->has_failure_detector()) return make({.seq = request.seq + 1, .members = request.members});
  std::shared_ptr<ProcessGroup> made;
  for (;;) {
    const detector::Survivors decision = facts.session->survivors_of(request, deadline);
    if (decision.confirmed && made && decision.seq == request.seq) return made;
    made.reset();
    request.seq = decision.seq;
    try {
      made = make(decision);
    } catch (const Error& error) {
      if (!may_shrink_further(error)) throw;
    }
    request.made = made != nullptr;
  }
}

}  // namespace maniple
