#include "bench/work_item.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include <maniple/comm/error.h>

namespace maniple::bench {

Case Case::of(Op op, DType dtype, ReduceOp reduce, int ranks, std::uint64_t bytes) {
  Case result{op, dtype, reduce, ranks, 0};
  if (op == Op::barrier) return result;
  const std::size_t parts = has_parts(op) ? static_cast<std::size_t>(ranks) : 1;
  result.count = std::max<std::size_t>(1, bytes / size_of(dtype) / parts) * parts;
  return result;
}

std::size_t Case::in_count(int rank) const noexcept {
  switch (op) {
    case Op::gather:
    case Op::all_gather: return part();
    case Op::scatter: return rank == 0 ? count : 0;
    default: return count;
  }
}

std::size_t Case::out_count(int rank) const noexcept {
  switch (op) {
    case Op::reduce:
    case Op::gather: return rank == 0 ? count : 0;
    case Op::scatter:
    case Op::reduce_scatter: return part();
    case Op::send: return rank < 2 ? count : 0;
    default: return count;
  }
}

bool Case::in_place() const noexcept { return op == Op::all_reduce || op == Op::broadcast || op == Op::send; }

const std::vector<Op>& measured_operations() {
  static const std::vector<Op> operations = {
      Op::all_reduce,     Op::broadcast,  Op::reduce,  Op::all_gather, Op::gather,
      Op::reduce_scatter, Op::all_to_all, Op::scatter, Op::barrier,    Op::send};
  return operations;
}

bool is_reduction(Op op) noexcept { return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter; }

bool has_parts(Op op) noexcept {
  return op == Op::gather || op == Op::all_gather || op == Op::scatter || op == Op::reduce_scatter ||
         op == Op::all_to_all;
}

double bus_factor(Op op, int ranks) noexcept {
  const double n = ranks;
  if (op == Op::all_reduce) return 2 * (n - 1) / n;
  return has_parts(op) ? (n - 1) / n : 1.0;
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkItem, op, dtype, reduce, ranks, bytes, backend, transport, buffer, algorithm,
                                   iterations, warmup, budget_s, timeout_s)

Case WorkItem::case_of(std::uint64_t size) const {
  const auto kind = parse_reduce_op(reduce);
  const ReduceOp reduction = kind == ReduceOp::premul_sum ? ReduceOp::premultiplied(2.0) : ReduceOp(kind);
  return Case::of(parse_op(op), parse_dtype(dtype), reduction, ranks, size);
}

std::vector<Case> WorkItem::cases() const {
  std::vector<Case> result;
  for (const std::uint64_t size : bytes) {
    const Case next = case_of(size);
    if (result.empty() || result.back().count != next.count) result.push_back(next);
  }
  return result;
}

std::string to_json_text(const WorkItem& item) { return nlohmann::json(item).dump(); }

WorkItem parse_work_item(const std::string& json_text) {
  try {
    return nlohmann::json::parse(json_text).get<WorkItem>();
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(std::string("not an item to measure: ") + error.what());
  }
}

}  // namespace maniple::bench
