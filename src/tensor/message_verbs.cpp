// send, recv and their kin of dist.h.
#include "tensor/verb.h"

namespace maniple {

void send(const torch::Tensor& tensor, int dst, int tag, const DistOptions& options) {
  const Staged staged(tensor, Access::read, {"send", "tensor"});
  group_of(options)->send(staged.buffer(), dst, tag, call_of(options));
}

int recv(const torch::Tensor& tensor, int src, int tag, const DistOptions& options) {
  const Staged staged(tensor, Access::write, {"recv", "tensor"});
  const int sender = group_of(options)->recv(staged.buffer(), src, tag, call_of(options));
  staged.write_back();
  return sender;
}

Work isend(const torch::Tensor& tensor, int dst, int tag, const DistOptions& options) {
  const Staged staged(tensor, Access::read, {"isend", "tensor"});
  return finishing(group_of(options)->isend(staged.buffer(), dst, tag, call_of(options)), {staged});
}

Work irecv(const torch::Tensor& tensor, int src, int tag, const DistOptions& options) {
  const Staged staged(tensor, Access::write, {"irecv", "tensor"});
  return finishing(group_of(options)->irecv(staged.buffer(), src, tag, nullptr, call_of(options)), {staged});
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const DistOptions& options) {
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
  std::vector<Work> works = group_of(options)->batch_isend_irecv(batch, call_of(options));
  for (std::size_t i = 0; i < works.size(); ++i) works[i] = finishing(works[i], {std::move(staged[i])});
  return works;
}

}  // namespace maniple
