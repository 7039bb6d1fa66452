#include "bench/series.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include <fmt/format.h>

namespace maniple::bench {
namespace {

using Key = std::tuple<std::string, std::string, std::string, std::string>;  // backend, transport, buffer, algorithm

Key key_of(const Row& row) { return {row.backend, row.transport, row.buffer, row.algorithm}; }

/// Maniple's lines are blue and teal and strong; peers have warm colours; limits are grey and dashed.
const std::array<const char*, 6> kNative = {"#1d4ed8", "#0891b2", "#7c3aed", "#059669", "#60a5fa", "#4338ca"};
const std::map<std::string, std::array<const char*, 3>> kOthers = {{"limit", {"#6b7280", "#a3a9b3", "#c3c8cf"}},
                                                                   {"openmpi", {"#dc2626", "#f87171", "#991b1b"}},
                                                                   {"mpich", {"#d97706", "#fbbf24", "#92400e"}},
                                                                   {"gloo", {"#be185d", "#f472b6", "#831843"}},
                                                                   {"maniple-mpi", {"#b91c1c", "#ef4444", "#7f1d1d"}},
                                                                   {"maniple-gloo", {"#65a30d", "#a3e635", "#3f6212"}}};

Stroke stroke_of(const std::string& backend, std::size_t index) {
  const auto found = kOthers.find(backend);
  if (found == kOthers.end()) return {kNative[index % kNative.size()], 2.6, index < kNative.size() ? "" : "2 4"};
  const char* color = found->second[index % found->second.size()];
  return {color, 1.7, backend == "limit" ? "6 4" : index < 3 ? "" : "2 4"};
}

std::string display_name(const std::string& backend) {
  if (backend == "native") return "Maniple";
  if (backend == "openmpi") return "Open MPI";
  if (backend == "mpich") return "MPICH";
  if (backend == "gloo") return "Gloo";
  if (backend == "maniple-mpi") return "Maniple on MPI";
  if (backend == "maniple-gloo") return "Maniple on Gloo";
  return backend == "limit" ? "limit of this machine" : backend;
}

}  // namespace

std::string chart_title(const Row& row) {
  std::string title = fmt::format("{} of {}, {} ranks", row.op, row.dtype, row.ranks);
  if (row.hosts > 1) title += fmt::format(", {} hosts", row.hosts);
  if (!row.link.empty()) title += ", links of " + row.link;
  return title;
}

std::vector<Series> series_of(const std::vector<Row>& rows) {
  const bool many_algorithms =
      std::any_of(rows.begin(), rows.end(), [&](const Row& row) { return row.algorithm != rows.front().algorithm; });
  std::vector<Key> order;
  std::map<Key, Series> by_key;
  std::map<std::string, std::size_t> used;  // lines of each backend so far
  for (const Row& row : rows) {
    const Key key = key_of(row);
    if (by_key.find(key) == by_key.end()) {
      order.push_back(key);
      Series series;
      series.label = display_name(row.backend) + (row.backend == "limit" ? "" : ", " + row.transport);
      series.label += row.backend == "native" || row.backend == "limit" ? ", " + row.buffer + " memory" : "";
      series.label += many_algorithms && row.algorithm != "auto" ? ", " + row.algorithm : "";
      series.stroke = stroke_of(row.backend, used[row.backend]++);
      series.mark = row.buffer == "registered" ? Mark::circle : Mark::square;
      by_key.emplace(key, std::move(series));
    }
    by_key[key].rows.push_back(row);
  }
  std::vector<Series> result;
  for (const Key& key : order) {
    auto& lines = by_key[key].rows;
    std::sort(lines.begin(), lines.end(), [](const Row& a, const Row& b) { return a.bytes < b.bytes; });
    result.push_back(std::move(by_key[key]));
  }
  return result;
}

}  // namespace maniple::bench
