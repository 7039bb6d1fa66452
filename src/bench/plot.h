// Rows as an SVG chart: for each operation bandwidth by size and, for small sizes, time by size; both axes logarithmic.
#pragma once

#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/row.h"

namespace maniple::bench {

std::string plot_svg(const Machine& machine, const std::vector<Row>& rows);

}  // namespace maniple::bench
