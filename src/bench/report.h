// Results as files: JSON, {"machine": {...}, "rows": [...]}, or CSV.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "bench/row.h"

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

}  // namespace maniple::bench
