#include "bench/row.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "bench/work_item.h"
#include <maniple/comm/error.h>

namespace maniple::bench {

void to_json(nlohmann::json& json, const Row& row) {
  json = nlohmann::ordered_json{{"op", row.op},
                                {"backend", row.backend},
                                {"transport", row.transport},
                                {"buffer", row.buffer},
                                {"ranks", row.ranks},
                                {"bytes", row.bytes},
                                {"median_us", row.median_us},
                                {"p99_us", row.p99_us},
                                {"algbw_gbps", row.algbw_gbps},
                                {"busbw_gbps", row.busbw_gbps},
                                {"dtype", row.dtype},
                                {"algorithm", row.algorithm},
                                {"iterations", row.iterations},
                                {"hosts", row.hosts}};
  if (!row.link.empty()) json["link"] = row.link;
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
  json.at("p99_us").get_to(row.p99_us);
  json.at("algbw_gbps").get_to(row.algbw_gbps);
  json.at("busbw_gbps").get_to(row.busbw_gbps);
  row.dtype = json.value("dtype", "float32");
  row.algorithm = json.value("algorithm", "");
  row.iterations = json.value("iterations", std::uint64_t{0});
  row.hosts = json.value("hosts", 1);
  row.link = json.value("link", "");
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
  const bool core = row.op == "limit";  // one core's memcpy and add: no bus between ranks
  row.busbw_gbps = core ? row.algbw_gbps : row.algbw_gbps * bus_factor(parse_op(row.op), row.ranks);
}

Row merge(const std::vector<Row>& repetitions) {
  Row result = repetitions.front();
  std::vector<double> medians, p99s;
  result.iterations = 0;
  for (const Row& row : repetitions) {
    medians.push_back(row.median_us);
    p99s.push_back(row.p99_us);
    result.iterations += row.iterations;
    if (result.error.empty()) result.error = row.error;
  }
  result.median_us = median(std::move(medians));
  result.p99_us = median(std::move(p99s));
  set_bandwidth(result);
  return result;
}

}  // namespace maniple::bench
