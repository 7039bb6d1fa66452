// Rows that make one line of a chart, with a label, a colour and a mark that tell them apart.
#pragma once

#include <string>
#include <vector>

#include "bench/row.h"
#include "bench/svg.h"

namespace maniple::bench {

struct Series {
  std::string label;
  Stroke stroke;
  Mark mark = Mark::circle;
  std::vector<Row> rows;  ///< by size
};

/// What rows in one chart share: operation, dtype, ranks, hosts.
std::string chart_title(const Row& row);

/// One series for each backend, transport, buffer and algorithm.
std::vector<Series> series_of(const std::vector<Row>& rows);

}  // namespace maniple::bench
