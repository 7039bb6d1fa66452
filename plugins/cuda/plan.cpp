#include "plugins/cuda/plan.h"

#include <algorithm>
#include <bit>

namespace maniple::cuda_plugin {
namespace {

bool is_floating(DType dtype) noexcept {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

bool has_root(Op op) noexcept {
  return op == Op::broadcast || op == Op::reduce || op == Op::gather || op == Op::scatter;
}

std::uint64_t signature(const Operation& operation, bool reduces, bool pairwise) noexcept {
  std::uint64_t hash = mix(1, static_cast<std::uint64_t>(operation.op));
  hash = mix(hash, static_cast<std::uint64_t>(operation.dtype));
  if (has_root(operation.op)) hash = mix(hash, static_cast<std::uint64_t>(operation.root));
  if (reduces) {
    hash = mix(hash, static_cast<std::uint64_t>(operation.reduce.kind()));
    hash = mix(hash, std::bit_cast<std::uint64_t>(operation.reduce.factor()));
    hash = mix(hash, (operation.first_stage ? 1 : 0) | (operation.last_stage ? 2 : 0));
    hash = mix(hash, static_cast<std::uint64_t>(operation.ranks));
  }
  if (!pairwise) hash = mix(mix(hash, operation.count), operation.parts.hash());
  return hash;
}

}  // namespace

Plan::Plan(const Operation& operation, int rank, int ranks) : send(ranks), recv(ranks) {
  const std::size_t element = operation.element();
  const std::size_t whole = operation.bytes();
  const bool is_root = rank == operation.root;
  const auto part = [element](const Parts& parts, int of) {
    return Range{parts.offset(of) * element, parts.count(of) * element};
  };
  const auto send_all = [&](Range range) {
    std::fill(send.begin(), send.end(), range);
    in_bytes = range.bytes;
    one_for_all = true;
    read_by_others = true;
  };
  const auto receive_parts = [&](const Parts& parts) {
    for (int peer = 0; peer < ranks; ++peer) recv[peer] = part(parts, peer);
    out_bytes = parts.total() * element;
  };
  const auto send_parts = [&](const Parts& parts) {
    for (int peer = 0; peer < ranks; ++peer) send[peer] = part(parts, peer);
    in_bytes = parts.total() * element;
    read_by_others = true;
  };
  const auto receive_all = [&](std::size_t bytes) {
    std::fill(recv.begin(), recv.end(), Range{0, bytes});
    out_bytes = bytes;
  };
  largest = whole;
  switch (operation.op) {
    case Op::broadcast:
      if (is_root) {
        send_all({0, whole});
      } else {
        recv[operation.root] = {0, whole};
        out_bytes = whole;
      }
      break;
    case Op::all_reduce:
    case Op::reduce:
      reduces = true;
      send_all({0, whole});
      if (operation.op == Op::all_reduce || is_root) receive_all(whole);
      read_by_others = operation.op == Op::all_reduce || !is_root;
      break;
    case Op::gather:
    case Op::all_gather:
      send_all({0, part(operation.parts, rank).bytes});
      if (operation.op == Op::all_gather || is_root) receive_parts(operation.parts);
      read_by_others = operation.op == Op::all_gather || !is_root;
      largest = operation.parts.largest() * element;
      break;
    case Op::scatter:
      if (is_root) send_parts(operation.parts);
      recv[operation.root] = {0, part(operation.parts, rank).bytes};
      out_bytes = recv[operation.root].bytes;
      largest = operation.parts.largest() * element;
      break;
    case Op::reduce_scatter:
      reduces = true;
      send_parts(operation.parts);
      receive_all(part(operation.parts, rank).bytes);
      largest = operation.parts.largest() * element;
      break;
    case Op::all_to_all:
      pairwise = true;
      send_parts(operation.in_parts);
      receive_parts(operation.out_parts);
      largest = std::max(operation.in_parts.largest(), operation.out_parts.largest()) * element;
      break;
    default: largest = 0; break;
  }
  if (ranks == 1) read_by_others = false;
  signature = cuda_plugin::signature(operation, reduces, pairwise);
}

std::uint64_t Plan::signature_of(Range range) const noexcept {
  return pairwise ? mix(signature, range.bytes) : signature;
}

bool can_reduce(DType dtype, ReduceOp::Kind kind) noexcept {
  switch (kind) {
    case ReduceOp::avg:
    case ReduceOp::premul_sum: return dtype != DType::bool8;
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor: return !is_floating(dtype);
    default: return true;
  }
}

int divisor(const Operation& operation, int ranks) noexcept {
  if (operation.reduce.kind() != ReduceOp::avg || !operation.last_stage) return 1;
  return operation.ranks != 0 ? operation.ranks : ranks;
}

}  // namespace maniple::cuda_plugin
