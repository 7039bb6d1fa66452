// send, recv and their kin of dist.h.
#include "tensor/verb.h"

namespace maniple {

void send(const torch::Tensor& tensor, int dst, int tag, const DistOptions& options) {
  const auto group = group_of(options);
  if (!takes_part(*group, "send")) return;
  const Staged staged(tensor, Access::read, {"send", "tensor"});
  group->send(staged.buffer(), dst, tag, call_of(options));
}

int recv(const torch::Tensor& tensor, int src, int tag, const DistOptions& options) {
  const auto group = group_of(options);
  if (!takes_part(*group, "recv")) return -1;
  const Staged staged(tensor, Access::write, {"recv", "tensor"});
  const int sender = group->recv(staged.buffer(), src, tag, call_of(options));
  staged.write_back();
  return sender;
}

Work isend(const torch::Tensor& tensor, int dst, int tag, const DistOptions& options) {
  const auto group = group_of(options);
  if (!takes_part(*group, "isend")) return done_work();
  const Staged staged(tensor, Access::read, {"isend", "tensor"});
  return finishing(group->isend(staged.buffer(), dst, tag, call_of(options)), {staged});
}

Work irecv(const torch::Tensor& tensor, int src, int tag, const DistOptions& options) {
  const auto group = group_of(options);
  if (!takes_part(*group, "irecv")) return done_work();
  const Staged staged(tensor, Access::write, {"irecv", "tensor"});
  return finishing(group->irecv(staged.buffer(), src, tag, nullptr, call_of(options)), {staged});
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const DistOptions& options) {
  const auto group = group_of(options);
  if (!takes_part(*group, "batch_isend_irecv")) return std::vector<Work>(operations.size(), done_work());
  std::vector<Staged> staged;
  std::vector<PointToPoint> batch;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const P2POp& one = operations[i];
    const bool sends = one.op == Op::send;
    staged.emplace_back(one.tensor, sends ? Access::read : Access::write,
                        Argument{"batch_isend_irecv", "operations", static_cast<int>(i)});
    batch.push_back(sends ? PointToPoint::send(staged.back().buffer(), one.peer, one.tag)
                          : PointToPoint::recv(staged.back().buffer(), one.peer, one.tag));
  }
  std::vector<Work> works = group->batch_isend_irecv(batch, call_of(options));
  for (std::size_t i = 0; i < works.size(); ++i) works[i] = finishing(works[i], {std::move(staged[i])});
  return works;
}

}  // namespace maniple
