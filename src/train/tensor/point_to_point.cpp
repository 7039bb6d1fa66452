// The point-to-point operations of dist.h, and the meaning of their rank arguments.
#include <algorithm>

#include "comm/backend/work_state.h"
#include "comm/base/check.h"
#include "train/tensor/run_operation.h"

namespace maniple {

int group_rank_of(const ProcessGroup& group, PeerRank peer, const char* operation, const char* argument) {
  const int rank = peer.rank();
  if (peer.is_group_rank() || rank == kAnyRank) return rank;
  const auto& members = group.topology().members;
  const auto has_it = [&](const Topology::Member& member) { return member.global_rank == rank; };
  if (rank >= 0 && rank < group.size() && has_it(members[rank])) return rank;
  const auto found = std::find_if(members.begin(), members.end(), has_it);
  if (found != members.end()) return static_cast<int>(found - members.begin());

  std::vector<int> ranks;
  bool is_world = true;
  for (const Topology::Member& member : members) {
    is_world = is_world && member.global_rank == static_cast<int>(ranks.size());
    ranks.push_back(member.global_rank);
  }
  if (is_world) return rank;
  throw InvalidArgument(
      format_text("{}: {} is global rank {}, which is not in group {} (global ranks {}); for rank {} of the group pass "
                  "GroupRank{{{}}}",
                  operation, argument, rank, group.name(), joined(ranks), rank, rank));
}

std::string rank_text(const ProcessGroup& group, int group_rank) {
  const int global_rank = group.topology().members[group_rank].global_rank;
  if (global_rank == group_rank) return format_text("rank {}", group_rank);
  return format_text("rank {} of the group, global rank {}", group_rank, global_rank);
}

void send(const torch::Tensor& tensor, PeerRank dst, int tag, const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "send")) return;
  const Staged staged(tensor, Access::read, {"send", "tensor"});
  group->send(staged.buffer(), group_rank_of(*group, dst, "send", "dst"), tag, message_call(*group, {staged}, options),
              where);
}

int recv(const torch::Tensor& tensor, PeerRank src, int tag, const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "recv")) return -1;
  const Staged staged(tensor, Access::write, {"recv", "tensor"});
  const int sender = group->recv(staged.buffer(), group_rank_of(*group, src, "recv", "src"), tag,
                                 message_call(*group, {staged}, options), where);
  staged.write_back();
  return group->topology().members[sender].global_rank;
}

Work isend(const torch::Tensor& tensor, PeerRank dst, int tag, const DistOptions& options,
           const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "isend")) return done_work();
  const Staged staged(tensor, Access::read, {"isend", "tensor"});
  const CallOptions call = message_call(*group, {staged}, options);
  return finishing(group->isend(staged.buffer(), group_rank_of(*group, dst, "isend", "dst"), tag, call, where),
                   staged.buffer().device, {staged});
}

Work irecv(const torch::Tensor& tensor, PeerRank src, int tag, const DistOptions& options,
           const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "irecv")) return done_work();
  const Staged staged(tensor, Access::write, {"irecv", "tensor"});
  const CallOptions call = message_call(*group, {staged}, options);
  return finishing(group->irecv(staged.buffer(), group_rank_of(*group, src, "irecv", "src"), tag, nullptr, call, where),
                   staged.buffer().device, {staged});
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const DistOptions& options,
                                    const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "batch_isend_irecv")) return std::vector<Work>(operations.size(), done_work());
  std::vector<Staged> staged;
  std::vector<PointToPoint> batch;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const P2POp& one = operations[i];
    const bool sends = one.op == Op::send;
    staged.emplace_back(one.tensor, sends ? Access::read : Access::write,
                        Argument{"batch_isend_irecv", "operations", static_cast<int>(i)});
    const int peer = group_rank_of(*group, one.peer, "batch_isend_irecv", "peer");
    batch.push_back(sends ? PointToPoint::send(staged.back().buffer(), peer, one.tag)
                          : PointToPoint::recv(staged.back().buffer(), peer, one.tag));
  }
  std::vector<Work> works = group->batch_isend_irecv(batch, message_call(*group, staged, options), where);
  for (std::size_t i = 0; i < works.size(); ++i)
    works[i] = finishing(works[i], staged[i].buffer().device, {std::move(staged[i])});
  return works;
}

}  // namespace maniple
