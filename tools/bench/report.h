// Results as a table for a terminal, and as files: JSON, {"machine": {...}, "rows": [...]}, or CSV.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tools/bench/work_item.h"

namespace maniple::bench {

/// What the measurements were taken on.
struct Machine {
  std::string cpu;              ///< model name, or the core's part when the kernel gives no name
  int cores = 0;                ///< that this process may use
  std::string arch;             ///< "aarch64"
  std::string kernel;           ///< "6.1.0"
  std::string instruction_set;  ///< widest vector set that the kernel reports: "avx2", "sve", "neon", ...
};

Machine this_machine();

/// `rows` is the array that the report holds.
std::string report_text(const Machine& machine, const nlohmann::ordered_json& rows);
std::string report_text(const Machine& machine, const std::vector<Row>& rows);

/// One line for each row, after one with the names of the columns; an error text is quoted.
std::string csv_text(const std::vector<Row>& rows);

/// Throws SystemError naming the file, unless it can be written, or made.
void require_writable(const std::string& path);
/// The same when it could not be written.
void write_file(const std::string& path, const std::string& text);

// Rows as an aligned table that fits a terminal of 80 columns.

/// Speed of `row` against `backend`'s fastest row of the same operation, ranks, size, dtype and hosts: 2 is twice as
/// fast. 0 when there is none.
double speed_against(const Row& row, const std::vector<Row>& rows, const std::string& backend);

/// Makes the lines one by one, so that rows can be shown as they are measured.
class TableWriter {
 public:
  /// `backends`: columns for their names.
  explicit TableWriter(bool with_ratio, std::size_t backends = 12) : with_ratio_(with_ratio), backends_(backends) {}

  std::string header() const;
  /// The row's line, after one that says what the columns do not (operation, ranks, dtype, hosts) where that has
  /// changed. `ratio` 0 leaves its column empty; an error stands where the figures would.
  std::string next(const Row& row, double ratio = 0);

 private:
  bool with_ratio_;
  std::size_t backends_;
  std::string context_;
};

/// The whole table; the ratio column appears when Open MPI is among the rows.
std::string table(const std::vector<Row>& rows);

}  // namespace maniple::bench
