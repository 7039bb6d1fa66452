#include "tools/bench/report.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "comm/base/system_error.h"
#include "tools/bench/work_item.h"

namespace maniple::bench {
namespace {

/// The first value of each key in /proc/cpuinfo.
std::map<std::string, std::string> cpu_info() {
  std::map<std::string, std::string> info;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    info.emplace(key, colon + 2 <= line.size() ? line.substr(colon + 2) : "");
  }
  return info;
}

/// The kernel reports Arm cores by number, not by name.
std::string arm_core(const std::string& part) {
  static const std::map<std::string, std::string> names = {
      {"0xd03", "Cortex-A53"},  {"0xd08", "Cortex-A72"},  {"0xd0b", "Cortex-A76"},
      {"0xd0c", "Neoverse-N1"}, {"0xd40", "Neoverse-V1"}, {"0xd49", "Neoverse-N2"},
      {"0xd4f", "Neoverse-V2"}, {"0xd83", "Neoverse-V3"}, {"0xd8e", "Neoverse-N3"}};
  const auto found = names.find(part);
  return found != names.end() ? found->second : "Arm core " + part;
}

std::string widest_vectors(const std::string& flags) {
  for (const char* name : {"avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd"}) {
    std::istringstream words(flags);
    for (std::string word; words >> word;) {
      if (word == name) return word == "asimd" ? "neon" : word;
    }
  }
  return "";
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                     : static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

Machine this_machine() {
  Machine machine;
  auto info = cpu_info();
  machine.cpu = !info["model name"].empty() ? info["model name"] : arm_core(info["CPU part"]);
  machine.instruction_set = widest_vectors(info["flags"] + " " + info["Features"]);
  machine.cores = usable_cores();
  utsname names{};
  uname(&names);
  machine.arch = names.machine;
  machine.kernel = names.release;
  return machine;
}

std::string report_text(const Machine& machine, const nlohmann::ordered_json& rows) {
  nlohmann::ordered_json report;
  report["machine"] = {{"cpu", machine.cpu},
                       {"cores", machine.cores},
                       {"arch", machine.arch},
                       {"kernel", machine.kernel},
                       {"instruction_set", machine.instruction_set}};
  report["rows"] = rows;
  return report.dump(1) + "\n";
}

std::string report_text(const Machine& machine, const std::vector<Row>& rows) {
  return report_text(machine, nlohmann::ordered_json(nlohmann::json(rows)));
}

std::string csv_text(const std::vector<Row>& rows) {
  std::string text =
      "op,backend,transport,buffer,ranks,bytes,median_us,mean_us,p99_us,algbw_gbps,busbw_gbps,dtype,algorithm,"
      "iterations,hosts,"
      "link,busy,rewritten,error\n";
  for (const Row& row : rows) {
    std::string error = row.error;
    for (std::size_t at = 0; (at = error.find('"', at)) != std::string::npos; at += 2) error.insert(at, 1, '"');
    text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", row.op, row.backend,
                        row.transport, row.buffer, row.ranks, row.bytes, row.median_us, row.mean_us, row.p99_us,
                        row.algbw_gbps, row.busbw_gbps, row.dtype, row.algorithm, row.iterations, row.hosts, row.link,
                        row.busy, row.rewritten ? 1 : 0, error.empty() ? "" : '"' + error + '"');
  }
  return text;
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

namespace {

constexpr const char* kReference = "openmpi";
constexpr const char* kFormat = "{:<{}} {:<9} {:<10} {:>7} {:>7} {:>7} {:>9} {:>9}";

bool is_core(const Row& row) { return row.op == "limit"; }

bool same_case(const Row& a, const Row& b) {
  return a.op == b.op && a.ranks == b.ranks && a.bytes == b.bytes && a.dtype == b.dtype && a.hosts == b.hosts &&
         a.link == b.link && a.busy == b.busy && a.rewritten == b.rewritten;
}

/// The row's properties that the columns do not show.
std::string context(const Row& row) {
  if (is_core(row)) return "one core of this machine, " + row.dtype;
  std::string text = fmt::format("{}, {} rank{}, {}", row.op, row.ranks, row.ranks == 1 ? "" : "s", row.dtype);
  if (!row.algorithm.empty() && row.algorithm != "auto") text += ", algorithm " + row.algorithm;
  if (row.hosts > 1) text += fmt::format(", {} hosts", row.hosts);
  if (!row.link.empty()) text += ", links of " + row.link;
  if (row.busy != 0) text += fmt::format(", with {} busy process{}", row.busy, row.busy == 1 ? "" : "es");
  if (row.rewritten) text += ", inputs rewritten";
  return text;
}

}  // namespace

double speed_against(const Row& row, const std::vector<Row>& rows, const std::string& backend) {
  double fastest = 0;
  for (const Row& other : rows) {
    if (other.backend != backend || !same_case(row, other) || !other.error.empty() || other.median_us <= 0) continue;
    fastest = fastest == 0 ? other.median_us : std::min(fastest, other.median_us);
  }
  return fastest == 0 || row.median_us <= 0 ? 0 : fastest / row.median_us;
}

std::string TableWriter::header() const {
  const std::string text = fmt::format(fmt::runtime(kFormat), "backend", backends_, "transport", "buffer", "bytes",
                                       "median", "p99", "algbw", "busbw");
  return text + (with_ratio_ ? fmt::format(" {:>6}\n", "x OMPI") : "\n");
}

std::string TableWriter::next(const Row& row, double ratio) {
  std::string text;
  if (context(row) != context_) {
    context_ = context(row);
    text += fmt::format("-- {}\n", context_);
  }
  const std::string& backend = is_core(row) ? row.algorithm : row.backend;  // "memcpy" and "add" are algorithms
  const bool sized = row.bytes > 0;
  const std::string bytes = sized ? format_bytes(row.bytes) : "-";
  if (!row.error.empty()) {
    return text + fmt::format("{:<{}} {:<9} {:<10} {:>7} error: {}\n", backend, backends_, row.transport, row.buffer,
                              bytes, row.error);
  }
  text += fmt::format(fmt::runtime(kFormat), backend, backends_, row.transport, row.buffer, bytes,
                      format_time(row.median_us), format_time(row.p99_us),
                      sized ? format_bandwidth(row.algbw_gbps) : "-", sized ? format_bandwidth(row.busbw_gbps) : "-");
  return text + (with_ratio_ && ratio > 0 ? fmt::format(" {:>6}\n", three_digits(ratio) + "x") : "\n");
}

std::string table(const std::vector<Row>& rows) {
  const bool with_ratio =
      std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.backend == kReference; });
  std::size_t backends = std::string_view("backend").size();
  for (const Row& row : rows) backends = std::max(backends, row.backend.size());
  TableWriter writer(with_ratio, backends);
  std::string text = writer.header();
  const Row* before = nullptr;
  for (const Row& row : rows) {
    if (before != nullptr && with_ratio && !is_core(*before) && !same_case(*before, row)) text += "\n";
    text += writer.next(row, with_ratio ? speed_against(row, rows, kReference) : 0);
    before = &row;
  }
  return text;
}

}  // namespace maniple::bench
