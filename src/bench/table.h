// Rows as an aligned table that fits a terminal of 80 columns.
#pragma once

#include <string>
#include <vector>

#include "bench/row.h"

namespace maniple::bench {

/// Speed of `row` against `backend`'s fastest row of the same operation, ranks, size, dtype and hosts: 2 is twice as
/// fast. 0 when there is none.
double speed_against(const Row& row, const std::vector<Row>& rows, const std::string& backend);

/// Makes the lines one by one, so that rows can be shown as they are measured.
class TableWriter {
 public:
  /// `backends`: columns for their names.
  explicit TableWriter(bool with_ratio, std::size_t backends = 12) : with_ratio_(with_ratio), backends_(backends) {}

  std::string header() const;
  /// The row's line, after one that says what the columns do not (operation, ranks, dtype, hosts) where that has changed.
  /// `ratio` 0 leaves its column empty; an error stands where the figures would.
  std::string next(const Row& row, double ratio = 0);

 private:
  bool with_ratio_;
  std::size_t backends_;
  std::string context_;
};

/// The whole table; the ratio column appears when Open MPI is among the rows.
std::string table(const std::vector<Row>& rows);

}  // namespace maniple::bench
