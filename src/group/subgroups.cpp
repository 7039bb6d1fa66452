#include "group/subgroups.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/check.h"
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

std::shared_ptr<ProcessGroup> make_group(ProcessGroup::Impl& parent, const std::string& name, const std::vector<int>& ranks,
                                         const GroupOptions& options, Deadline deadline) {
  GroupFacts facts = parent.facts();
  facts.name = name;
  std::vector<int> global_ranks;
  for (const int rank : ranks) global_ranks.push_back(parent.facts().topology.members[static_cast<std::size_t>(rank)].global_rank);
  facts.topology = topology_of(*facts.session, global_ranks);
  facts.timeout = options.timeout.value_or(facts.timeout);
  facts.transport = options.transport.value_or(facts.transport);
  facts.algorithm = options.algorithm.value_or(facts.algorithm);
  return std::make_shared<ProcessGroup>(std::make_unique<ProcessGroup::Impl>(std::move(facts), deadline));
}

}  // namespace

std::shared_ptr<ProcessGroup> ProcessGroup::new_group(std::span<const int> ranks, const GroupOptions& options, Call call) {
  MANIPLE_REQUIRE(!ranks.empty(), "new_group: no ranks");
  std::set<int> seen;
  for (const int rank : ranks) {
    MANIPLE_REQUIRE(rank >= 0 && rank < size(), "new_group: rank {} in a group of {} ranks", rank, size());
    MANIPLE_REQUIRE(seen.insert(rank).second, "new_group: rank {} is listed twice", rank);
  }
  // A broadcast of nothing whose "counts" are the list: ranks that pass different lists are told so.
  const Deadline deadline = Deadline::after(impl_->limit(call));
  const std::vector<std::size_t> list(ranks.begin(), ranks.end());
  Operation agree = barrier_operation(call);
  agree.parts = Parts(list);
  impl_->run(agree, call);
  const std::string name = fmt::format("{}/{}", impl_->facts().name, impl_->next_group());
  if (seen.count(rank()) == 0) return nullptr;
  return make_group(*impl_, name, {ranks.begin(), ranks.end()}, options, deadline);
}

std::shared_ptr<ProcessGroup> ProcessGroup::split(int color, int key, const GroupOptions& options, Call call) {
  const Deadline deadline = Deadline::after(impl_->limit(call));
  const std::int32_t mine[2] = {color, key};
  std::vector<std::int32_t> all(2 * static_cast<std::size_t>(size()));
  impl_->run(all_gather_operation({rank(), size()}, buffer_of(std::span(mine)), buffer_of(all), {}, call), call);
  const std::string name = fmt::format("{}/{}.{}", impl_->facts().name, impl_->next_group(), color);
  if (color < 0) return nullptr;
  std::vector<std::pair<int, int>> chosen;  // (key, rank)
  for (int r = 0; r < size(); ++r) {
    const auto at = 2 * static_cast<std::size_t>(r);
    if (all[at] == color) chosen.emplace_back(all[at + 1], r);
  }
  std::sort(chosen.begin(), chosen.end());
  std::vector<int> ranks;
  for (const auto& [k, r] : chosen) ranks.push_back(r);
  return make_group(*impl_, name, ranks, options, deadline);
}

}  // namespace maniple
