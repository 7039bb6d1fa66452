#include "tools/bench/work_item.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "comm/base/check.h"
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
                                   rewrite, iterations, warmup, budget_s, timeout_s)

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

void to_json(nlohmann::json& json, const Row& row) {
  json = nlohmann::ordered_json{{"op", row.op},
                                {"backend", row.backend},
                                {"transport", row.transport},
                                {"buffer", row.buffer},
                                {"ranks", row.ranks},
                                {"bytes", row.bytes},
                                {"median_us", row.median_us},
                                {"mean_us", row.mean_us},
                                {"p99_us", row.p99_us},
                                {"algbw_gbps", row.algbw_gbps},
                                {"busbw_gbps", row.busbw_gbps},
                                {"dtype", row.dtype},
                                {"algorithm", row.algorithm},
                                {"iterations", row.iterations},
                                {"hosts", row.hosts}};
  if (!row.link.empty()) json["link"] = row.link;
  if (row.busy != 0) json["busy"] = row.busy;
  if (row.rewritten) json["rewritten"] = true;
  if (!row.error.empty()) json["error"] = row.error;
}

void from_json(const nlohmann::json& json, Row& row) {
  json.at("op").get_to(row.op);
  json.at("backend").get_to(row.backend);
  json.at("transport").get_to(row.transport);
  json.at("buffer").get_to(row.buffer);
  json.at("ranks").get_to(row.ranks);
  json.at("bytes").get_to(row.bytes);
  json.at("median_us").get_to(row.median_us);
  json.at("mean_us").get_to(row.mean_us);
  json.at("p99_us").get_to(row.p99_us);
  json.at("algbw_gbps").get_to(row.algbw_gbps);
  json.at("busbw_gbps").get_to(row.busbw_gbps);
  row.dtype = json.value("dtype", "float32");
  row.algorithm = json.value("algorithm", "");
  row.iterations = json.value("iterations", std::uint64_t{0});
  row.hosts = json.value("hosts", 1);
  row.link = json.value("link", "");
  row.busy = json.value("busy", 0);
  row.rewritten = json.value("rewritten", false);
  row.error = json.value("error", "");
}

std::string to_line(const Row& row) { return nlohmann::json(row).dump(); }

std::optional<Row> parse_row_line(std::string_view line) {
  if (line.empty() || line.front() != '{') return std::nullopt;
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (json.is_discarded() || !json.contains("median_us")) return std::nullopt;
  try {
    return json.get<Row>();
  } catch (const nlohmann::json::exception& error) {
    throw ProtocolError(std::string("a measuring program printed a row that lacks something: ") + error.what());
  }
}

void set_bandwidth(Row& row) {
  if (row.median_us <= 0) return;
  row.algbw_gbps = static_cast<double>(row.bytes) / row.median_us / 1e3;
  const bool core = row.op == "limit";  // one core's memcpy and add, which use no bus between ranks
  row.busbw_gbps = core ? row.algbw_gbps : row.algbw_gbps * bus_factor(parse_op(row.op), row.ranks);
}

Row merge(const std::vector<Row>& repetitions) {
  Row result = repetitions.front();
  std::vector<double> medians, means, p99s;
  result.iterations = 0;
  for (const Row& row : repetitions) {
    medians.push_back(row.median_us);
    means.push_back(row.mean_us);
    p99s.push_back(row.p99_us);
    result.iterations += row.iterations;
    if (result.error.empty()) result.error = row.error;
  }
  result.median_us = median(std::move(medians));
  result.mean_us = median(std::move(means));
  result.p99_us = median(std::move(p99s));
  set_bandwidth(result);
  return result;
}

namespace {

constexpr std::uint64_t kLargest = std::uint64_t{1} << 40;
constexpr std::uint64_t kStep = 4;

std::uint64_t parse_size(std::string_view text) {
  std::uint64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  const std::string_view suffix(end, static_cast<std::size_t>(last - end));
  int shift = -1;
  if (suffix.empty() || suffix == "B") shift = 0;
  if (suffix == "K" || suffix == "k" || suffix == "KiB") shift = 10;
  if (suffix == "M" || suffix == "m" || suffix == "MiB") shift = 20;
  if (suffix == "G" || suffix == "g" || suffix == "GiB") shift = 30;
  MANIPLE_REQUIRE(error == std::errc() && shift >= 0 && value <= (kLargest >> shift) && value > 0,
                  "\"{}\" is not a size; expected bytes such as 4, 64K, 16M or 1G", text);
  return value << shift;
}

void add_range(std::uint64_t from, std::uint64_t to, std::vector<std::uint64_t>& sizes) {
  MANIPLE_REQUIRE(from <= to, "the range of sizes {}..{} goes down", from, to);
  for (std::uint64_t size = from; size < to; size *= kStep) sizes.push_back(size);
  sizes.push_back(to);
}

}  // namespace

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    if (comma != 0) parts.emplace_back(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return parts;
}

std::vector<std::uint64_t> parse_sizes(std::string_view text) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& part : split_list(text)) {
    const std::size_t dots = part.find("..");
    if (dots == std::string::npos) {
      sizes.push_back(parse_size(part));
    } else {
      add_range(parse_size(std::string_view(part).substr(0, dots)), parse_size(std::string_view(part).substr(dots + 2)),
                sizes);
    }
  }
  MANIPLE_REQUIRE(!sizes.empty(), "no sizes in \"{}\"; expected a list such as 4,1K,1M or a range such as 4..256M",
                  text);
  return sizes;
}

std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  auto value = static_cast<double>(bytes);
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return value == std::floor(value) ? fmt::format("{:.0f} {}", value, kUnits[unit])
                                    : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string format_time(double microseconds) {
  if (microseconds < 999.5) return three_digits(microseconds) + " us";
  if (microseconds < 999'500) return three_digits(microseconds / 1e3) + " ms";
  return three_digits(microseconds / 1e6) + " s";
}

std::string format_bandwidth(double gigabytes_per_second) {
  if (gigabytes_per_second < 0.0995) return three_digits(gigabytes_per_second * 1e3) + " MB/s";
  return three_digits(gigabytes_per_second) + " GB/s";
}

}  // namespace maniple::bench
