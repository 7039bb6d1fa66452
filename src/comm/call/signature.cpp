#include "comm/call/signature.h"

#include <fmt/format.h>

namespace maniple {
namespace {

/// The name of an enumerator, or its number when there is no such enumerator.
template <class Enum>
std::string name_of(std::uint64_t value, int known, const char* what) {
  if (value < static_cast<std::uint64_t>(known)) return std::string(to_string(static_cast<Enum>(value)));
  return fmt::format("{} {}", what, value);
}

bool has_root(Op op) noexcept {
  return op == Op::broadcast || op == Op::reduce || op == Op::gather || op == Op::scatter;
}

// Lists are sent as a hash; in messages it at least distinguishes two lists.
std::uint32_t printed(std::uint64_t hash) noexcept { return static_cast<std::uint32_t>(hash >> 32 ^ hash); }

bool has_reduction(Op op) noexcept { return op == Op::reduce || op == Op::all_reduce || op == Op::reduce_scatter; }

}  // namespace

std::string Signature::describe() const {
  const std::uint64_t op_number = what & 0xff;
  const std::uint64_t reduce_number = (what >> 16) & 0xff;
  const bool known = op_number < kOpCount;
  const Op op = static_cast<Op>(known ? op_number : 0);
  const bool premultiplied = reduce_number == ReduceOp::premul_sum;

  // Ranks that create a group agree on it by a barrier that carries the list and the options.
  if (known && op == Op::barrier && detail != 0)
    return fmt::format("new_group #{} of list and options {:08x}", seq, printed(detail));
  const std::string dtype_name = name_of<DType>((what >> 8) & 0xff, kDTypeCount, "dtype");
  if (known && op == Op::send)
    return fmt::format("send {}[{}] tag {}", dtype_name, count, static_cast<std::int32_t>(detail));
  std::string text = fmt::format("{} #{}", name_of<Op>(op_number, kOpCount, "op"), seq);
  if (known && op == Op::barrier) return text;
  text += " " + dtype_name;
  const std::uint64_t list = !known ? 0 : !premultiplied ? detail : has_root(op) ? 0 : what >> 32;
  if (list == 0) {
    text += fmt::format("[{}]", count);
  } else if (count != 0) {
    text += fmt::format("[{} in parts {:08x}]", count, printed(list));
  } else {
    text += op == Op::all_to_all ? "[uneven]" : fmt::format("[uneven {:08x}]", printed(list));
  }
  if (!known || has_reduction(op)) {
    text += fmt::format(" {}", name_of<ReduceOp::Kind>(reduce_number, ReduceOp::kKindCount, "reduce op"));
    if (premultiplied) {
      double factor = 0;
      std::memcpy(&factor, &detail, sizeof factor);
      text += fmt::format(" by {}", factor);
    }
  }
  if (!known || has_root(op)) text += fmt::format(" root {}", static_cast<std::int32_t>(what >> 32));
  return text;
}

std::string place_text(const char* file, unsigned line) {
  return line == 0 ? std::string(file) : fmt::format("{}:{}", file, line);
}

std::string call_at(const std::string& call, const std::string& place) {
  if (place.empty()) return call;
  return fmt::format("{}{} {}", call, place.starts_with("in ") ? "" : " at", place);
}

ErrorInfo mismatch_of(std::vector<RankCall> calls) {
  ErrorInfo info;
  info.kind = ErrorKind::mismatch;
  info.reason = "ranks called different things:";
  const char* separator = "";
  for (const RankCall& call : calls) {
    info.reason += fmt::format("{} rank {}: {}", separator, call.rank, call_at(call.call, call.place));
    separator = ";";
  }
  info.calls = std::move(calls);
  return info;
}

}  // namespace maniple
