// Results as a table for a terminal, and as files: JSON, {"machine": {...}, "rows": [...]}, or CSV.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tools/bench/work_item.h"

namespace maniple::bench {

/// The machine on which the measurements were taken.
struct Machine {
  std::string cpu;              ///< model name, or the core's part number if the kernel reports no name
  int cores = 0;                ///< cores that this process may use
  std::string arch;             ///< "aarch64"
  std::string kernel;           ///< "6.1.0"
  std::string instruction_set;  ///< widest vector extension that the kernel reports: "avx2", "sve", "neon", ...
};

Machine this_machine();

/// `rows` is the report's array of rows.
std::string report_text(const Machine& machine, const nlohmann::ordered_json& rows);
std::string report_text(const Machine& machine, const std::vector<Row>& rows);

/// A line with the column names, then one line per row; error texts are quoted.
std::string csv_text(const std::vector<Row>& rows);

/// Throws SystemError naming the file unless it can be written or created.
void require_writable(const std::string& path);
/// Throws SystemError naming the file if writing fails.
void write_file(const std::string& path, const std::string& text);

// Rows as an aligned table that fits an 80-column terminal.

/// Speed of `row` relative to `backend`'s fastest row with the same operation, ranks, size, dtype and hosts: 2 is twice
/// as fast. 0 if there is no such row.
double speed_against(const Row& row, const std::vector<Row>& rows, const std::string& backend);

/// Formats the table line by line, so that rows can be shown as they are measured.
class TableWriter {
 public:
  /// `backends`: width of the column with the backends' names.
  explicit TableWriter(bool with_ratio, std::size_t backends = 12) : with_ratio_(with_ratio), backends_(backends) {}

  std::string header() const;
  /// The row's line, preceded by a line with operation, ranks, dtype and hosts if these have changed. `ratio` 0 leaves
  /// its column empty; an error replaces the figures.
  std::string next(const Row& row, double ratio = 0);

 private:
  bool with_ratio_;
  std::size_t backends_;
  std::string context_;
};

/// The whole table; the ratio column appears when Open MPI is among the rows.
std::string table(const std::vector<Row>& rows);

}  // namespace maniple::bench
