#include "cli/bench/report.h"

#include <fstream>

#include <nlohmann/json.hpp>

#include "base/system_error.h"

namespace maniple::bench {

std::string report_text(const Machine& machine, const std::vector<Row>& rows) {
  nlohmann::ordered_json report;
  report["machine"] = {{"cpu", machine.cpu},
                       {"cores", machine.cores},
                       {"arch", machine.arch},
                       {"kernel", machine.kernel},
                       {"instruction_set", machine.instruction_set}};
  report["rows"] = nlohmann::json(rows);
  return report.dump(1) + "\n";
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw_system_error("write " + path);
}

}  // namespace maniple::bench
