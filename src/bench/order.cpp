#include "bench/order.h"

#include <nlohmann/json.hpp>

#include <maniple/comm/error.h>

namespace maniple::bench {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Order, op, dtype, reduce, ranks, bytes, backend, transport, buffer, algorithm,
                                   iterations, warmup, budget_s, timeout_s)

Case Order::case_of(std::uint64_t size) const {
  const auto kind = parse_reduce_op(reduce);
  const ReduceOp reduction = kind == ReduceOp::premul_sum ? ReduceOp::premultiplied(2.0) : ReduceOp(kind);
  return Case::of(parse_op(op), parse_dtype(dtype), reduction, ranks, size);
}

std::vector<Case> Order::cases() const {
  std::vector<Case> result;
  for (const std::uint64_t size : bytes) {
    const Case next = case_of(size);
    if (result.empty() || result.back().count != next.count) result.push_back(next);
  }
  return result;
}

std::string to_json_text(const Order& order) { return nlohmann::json(order).dump(); }

Order parse_order(const std::string& json_text) {
  try {
    return nlohmann::json::parse(json_text).get<Order>();
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(std::string("not an order to measure: ") + error.what());
  }
}

}  // namespace maniple::bench
