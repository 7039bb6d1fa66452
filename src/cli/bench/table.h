// Rows as an aligned table of at most 110 columns.
#pragma once

#include <string>
#include <vector>

#include "cli/bench/row.h"

namespace maniple::bench {

/// Speed of `row` against `backend`'s fastest row of the same operation, ranks, size, dtype and hosts: 2 is twice as fast.
/// 0 when there is none.
double speed_against(const Row& row, const std::vector<Row>& rows, const std::string& backend);

std::string table_header(bool with_ratio);
/// `ratio` 0 leaves the column empty; rows with an error show it instead of figures.
std::string table_line(const Row& row, bool with_ratio, double ratio = 0);

/// The whole table; the ratio column appears when Open MPI is among the rows. A line says what the columns do not (dtype,
/// algorithm, hosts) wherever it changes.
std::string table(const std::vector<Row>& rows);

}  // namespace maniple::bench
