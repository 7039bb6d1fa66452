// Results as a JSON file: {"machine": {...}, "rows": [...]}.
#pragma once

#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/row.h"

namespace maniple::bench {

std::string report_text(const Machine& machine, const std::vector<Row>& rows);

/// Throws SystemError naming the file, unless it can be written, or made.
void require_writable(const std::string& path);
/// The same when it could not be written.
void write_file(const std::string& path, const std::string& text);

}  // namespace maniple::bench
