#include "jobs/job_list_table.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace maniple::launch {
namespace {

constexpr std::size_t kColumns = 7;
constexpr std::size_t kLeastCommand = 10;
using Row = std::array<std::string, kColumns>;

// Of the columns whose text is a user's.
struct Most {
  std::size_t job, hosts;
};
constexpr Most kComfortable{16, 18};
constexpr Most kNarrow{8, 9};

// Bytes that begin a character: those inside one do not take a column.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string shortened(const std::string& text, std::size_t most) {
  if (width_of(text) <= most) return text;
  std::string result;
  std::size_t width = 0;
  for (const char c : text) {
    if ((c & 0xC0) != 0x80 && ++width > most - 2) break;
    result += c;
  }
  return result + "..";
}

std::string hosts_text(const std::vector<std::string>& hosts, std::size_t most) {
  if (hosts.empty()) return "-";
  const std::string more = hosts.size() > 1 ? fmt::format(" +{}", hosts.size() - 1) : "";
  const std::size_t room = most > more.size() + 3 ? most - more.size() : 3;
  return shortened(printable(hosts[0]), room) + more;
}

std::array<std::size_t, kColumns> widths_of(const std::vector<Row>& rows) {
  std::array<std::size_t, kColumns> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i + 1 < kColumns; ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  return widths;
}

std::size_t width_before_command(const std::vector<Row>& rows) {
  std::size_t before = 0;
  const auto widths = widths_of(rows);
  for (std::size_t i = 0; i + 1 < kColumns; ++i) before += widths[i] + 2;
  return before;
}

std::vector<Row> rows_of(const std::vector<JobInfo>& jobs, std::int64_t now, const Most& most) {
  std::vector<Row> rows = {{"JOB", "PID", "RANKS", "HOSTS", "RESTARTS", "ELAPSED", "COMMAND"}};
  for (const JobInfo& job : jobs) {
    rows.push_back({shortened(printable(job.id), most.job), std::to_string(job.pid),
                    fmt::format("{}/{}", job.ranks_up, job.world_size), hosts_text(job.hosts, most.hosts),
                    std::to_string(job.restarts), elapsed_text(now - job.started), printable(job.command)});
  }
  return rows;
}

}  // namespace

std::string printable(const std::string& text) {
  std::string result = text;
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return result;
}

std::string elapsed_text(std::int64_t seconds) {
  seconds = std::max<std::int64_t>(seconds, 0);
  const std::int64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return fmt::format("{}d{:02}h", days, hours % 24);
  if (hours > 0) return fmt::format("{}h{:02}m", hours, minutes % 60);
  if (minutes > 0) return fmt::format("{}m{:02}s", minutes, seconds % 60);
  return fmt::format("{}s", seconds);
}

std::string job_table(const std::vector<JobInfo>& jobs, std::int64_t now, int width) {
  const std::size_t whole = width > 0 ? static_cast<std::size_t>(width) : std::string::npos;
  std::vector<Row> rows = rows_of(jobs, now, kComfortable);
  if (width_before_command(rows) + kLeastCommand > whole) rows = rows_of(jobs, now, kNarrow);
  const std::size_t before = width_before_command(rows);
  const std::size_t room = whole == std::string::npos ? whole : std::max(whole, before + kLeastCommand) - before;
  const auto widths = widths_of(rows);
  std::string text;
  for (const Row& row : rows) {
    for (std::size_t i = 0; i + 1 < kColumns; ++i) text += row[i] + std::string(widths[i] - width_of(row[i]) + 2, ' ');
    text += shortened(row.back(), room) + "\n";
  }
  return text;
}

}  // namespace maniple::launch
