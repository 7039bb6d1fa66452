#include "bench/report.h"

#include <unistd.h>

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

void require_writable(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string& asked = ::access(path.c_str(), F_OK) == 0 ? path : folder;
  if (::access(asked.c_str(), W_OK) != 0) throw_system_error("write " + path);
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw_system_error("write " + path);
}

}  // namespace maniple::bench
