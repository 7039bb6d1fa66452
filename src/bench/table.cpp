#include "bench/table.h"

#include <algorithm>

#include <fmt/format.h>

#include "bench/sizes.h"

namespace maniple::bench {
namespace {

constexpr const char* kReference = "openmpi";
constexpr const char* kFormat = "{:<{}} {:<9} {:<10} {:>7} {:>7} {:>7} {:>9} {:>9}";

bool is_core(const Row& row) { return row.op == "limit"; }

bool same_case(const Row& a, const Row& b) {
  return a.op == b.op && a.ranks == b.ranks && a.bytes == b.bytes && a.dtype == b.dtype && a.hosts == b.hosts &&
         a.link == b.link;
}

/// What the columns do not show.
std::string context(const Row& row) {
  if (is_core(row)) return "one core of this machine, " + row.dtype;
  std::string text = fmt::format("{}, {} rank{}, {}", row.op, row.ranks, row.ranks == 1 ? "" : "s", row.dtype);
  if (!row.algorithm.empty() && row.algorithm != "auto") text += ", algorithm " + row.algorithm;
  if (row.hosts > 1) text += fmt::format(", {} hosts", row.hosts);
  if (!row.link.empty()) text += ", links of " + row.link;
  return text;
}

}  // namespace

double speed_against(const Row& row, const std::vector<Row>& rows, const std::string& backend) {
  double fastest = 0;
  for (const Row& other : rows) {
    if (other.backend != backend || !same_case(row, other) || !other.error.empty() || other.median_us <= 0) continue;
    fastest = fastest == 0 ? other.median_us : std::min(fastest, other.median_us);
  }
  return fastest == 0 || row.median_us <= 0 ? 0 : fastest / row.median_us;
}

std::string TableWriter::header() const {
  const std::string text = fmt::format(fmt::runtime(kFormat), "backend", backends_, "transport", "buffer", "bytes",
                                       "median", "p99", "algbw", "busbw");
  return text + (with_ratio_ ? fmt::format(" {:>6}\n", "x OMPI") : "\n");
}

std::string TableWriter::next(const Row& row, double ratio) {
  std::string text;
  if (context(row) != context_) {
    context_ = context(row);
    text += fmt::format("-- {}\n", context_);
  }
  const std::string& backend = is_core(row) ? row.algorithm : row.backend;  // memcpy, add
  const bool sized = row.bytes > 0;
  const std::string bytes = sized ? format_bytes(row.bytes) : "-";
  if (!row.error.empty()) {
    return text + fmt::format("{:<{}} {:<9} {:<10} {:>7} error: {}\n", backend, backends_, row.transport, row.buffer,
                              bytes, row.error);
  }
  text += fmt::format(fmt::runtime(kFormat), backend, backends_, row.transport, row.buffer, bytes,
                      format_time(row.median_us), format_time(row.p99_us),
                      sized ? format_bandwidth(row.algbw_gbps) : "-", sized ? format_bandwidth(row.busbw_gbps) : "-");
  return text + (with_ratio_ && ratio > 0 ? fmt::format(" {:>6}\n", three_digits(ratio) + "x") : "\n");
}

std::string table(const std::vector<Row>& rows) {
  const bool with_ratio =
      std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.backend == kReference; });
  std::size_t backends = std::string_view("backend").size();
  for (const Row& row : rows) backends = std::max(backends, row.backend.size());
  TableWriter writer(with_ratio, backends);
  std::string text = writer.header();
  const Row* before = nullptr;
  for (const Row& row : rows) {
    if (before != nullptr && with_ratio && !is_core(*before) && !same_case(*before, row)) text += "\n";
    text += writer.next(row, with_ratio ? speed_against(row, rows, kReference) : 0);
    before = &row;
  }
  return text;
}

}  // namespace maniple::bench
