#include "group/subgroups.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/check.h"
#include "collective/selection.h"
#include "group/group_impl.h"
#include "group/validate.h"

namespace maniple {

Topology topology_of(const Session& session, const std::vector<int>& global_ranks) {
  Topology topology;
  std::map<std::string, int> nodes;
  for (std::size_t r = 0; r < global_ranks.size(); ++r) {
    const PeerInfo& peer = session.peer(global_ranks[r]);
    const auto [it, fresh] = nodes.emplace(peer.host_key, static_cast<int>(nodes.size()));
    if (fresh) topology.nodes.emplace_back();
    auto& node = topology.nodes[static_cast<std::size_t>(it->second)];
    topology.members.push_back({global_ranks[r], it->second, static_cast<int>(node.size()), peer.host_name, peer.pid});
    node.push_back(static_cast<int>(r));
    if (global_ranks[r] == session.rank()) topology.rank = static_cast<int>(r);
  }
  return topology;
}

namespace {

std::shared_ptr<ProcessGroup> make_group(detail::GroupImpl& parent, const std::string& name,
                                         const std::vector<int>& ranks, const GroupOptions& options,
                                         Deadline deadline) {
  GroupFacts facts = parent.facts();
  facts.name = name;
  std::vector<int> global_ranks;
  for (const int rank : ranks)
    global_ranks.push_back(parent.facts().topology.members[static_cast<std::size_t>(rank)].global_rank);
  facts.topology = topology_of(*facts.session, global_ranks);
  facts.timeout = options.timeout.value_or(facts.timeout);
  facts.transport = options.transport.value_or(facts.transport);
  facts.algorithm = options.algorithm.value_or(facts.algorithm);
  return std::make_shared<ProcessGroup>(std::make_unique<detail::GroupImpl>(std::move(facts), deadline));
}

std::shared_ptr<ProcessGroup> make_outside(const detail::GroupImpl& parent, const std::string& name) {
  GroupFacts facts = parent.facts();
  facts.name = name;
  return std::make_shared<ProcessGroup>(std::make_unique<detail::GroupImpl>(std::move(facts)));
}

// Ranks compare what they were given before they look at it: so either all refuse it, or none.
std::vector<std::size_t> words_of(const GroupOptions& options) {
  std::vector<std::size_t> words = {options.timeout.has_value(), 0,
                                    options.transport ? 1 + static_cast<std::size_t>(*options.transport) : 0,
                                    options.algorithm ? 1 + options.algorithm->size() : 0};
  if (options.timeout) words[1] = std::bit_cast<std::uint64_t>(options.timeout->count());
  if (options.algorithm) words.insert(words.end(), options.algorithm->begin(), options.algorithm->end());
  return words;
}

void require_good(const GroupOptions& options, const char* verb) {
  MANIPLE_REQUIRE(!options.timeout || options.timeout->count() > 0, "{}: timeout is {} s; it must be positive", verb,
                  options.timeout->count());
  if (options.transport) require_transport(*options.transport);
  if (options.algorithm) require_algorithm(*options.algorithm);
}

}  // namespace

std::shared_ptr<ProcessGroup> ProcessGroup::new_group(std::span<const int> ranks, const GroupOptions& options,
                                                      const CallOptions& call) {
  require_member("new_group");
  const Deadline deadline = Deadline::after(impl_->limit(call));
  // A barrier whose "counts" are the list and the options: ranks that pass different ones get a Mismatch.
  std::vector<std::size_t> given = words_of(options);
  given.insert(given.end(), ranks.begin(), ranks.end());
  Operation agree = barrier_operation(call);
  agree.parts = Parts(given);
  impl_->run_now(agree, call);
  MANIPLE_REQUIRE(!ranks.empty(), "new_group: no ranks");
  std::set<int> seen;
  for (const int rank : ranks) {
    MANIPLE_REQUIRE(rank >= 0 && rank < size(), "new_group: rank {} in a group of {} ranks", rank, size());
    MANIPLE_REQUIRE(seen.insert(rank).second, "new_group: rank {} is listed twice", rank);
  }
  require_good(options, "new_group");
  const std::string name = fmt::format("{}/{}", impl_->facts().name, impl_->next_group());
  if (seen.count(rank()) == 0) return make_outside(*impl_, name);
  return make_group(*impl_, name, {ranks.begin(), ranks.end()}, options, deadline);
}

std::shared_ptr<ProcessGroup> ProcessGroup::split(int color, int key, const GroupOptions& options,
                                                  const CallOptions& call) {
  require_member("split");
  const Deadline deadline = Deadline::after(impl_->limit(call));
  const std::int64_t mine[3] = {color, key, static_cast<std::int64_t>(Parts(words_of(options)).hash())};
  std::vector<std::int64_t> all(3 * static_cast<std::size_t>(size()));
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
    const auto at = 3 * static_cast<std::size_t>(r);
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

}  // namespace maniple
