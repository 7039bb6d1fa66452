#include "comm/base/own_variables.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/environment.h"
#include "comm/base/log.h"

namespace maniple {
namespace {

constexpr std::string_view kPrefix = "MANIPLE_";
constexpr const char* kWarned = "MANIPLE_WARNED";
constexpr std::size_t kMaxNamed = 8;

constexpr OwnVariable kOwnVariables[] = {
    {"MANIPLE_SECRET_FILE", "file with the job's secret", true},
    {"MANIPLE_SECRET_FD", "inherited descriptor with the job's secret", true},
    {"MANIPLE_JOB", "name of the job", true},
    {"MANIPLE_GENERATION", "which start of the job this is", true},
    {"MANIPLE_RESTART_COUNT", "how often the launcher has started the group again", true},
    {"MANIPLE_DEVICES_PER_PROCESS", "how many devices the launcher gave this process", true},
    {"MANIPLE_STORE_HOSTED", "1: the launcher serves the store", true},
    {"MANIPLE_INIT_FD", "inherited socket (descriptor:inode) by which a rank notifies the launcher of init()"},
    {"MANIPLE_REPORT_FD", "inherited socket (descriptor:inode) by which a rank reports its failure to the launcher"},
    {"MANIPLE_MEMBERS_FD", "inherited page (descriptor:inode:worker:replaces) with the members of an elastic job"},
    {"MANIPLE_SPAWNED", "1: RANK and WORLD_SIZE are spawn's; what init() is given counts more"},
    {"MANIPLE_SPAWN_FD", "makes a program a process of spawn"},
    {"MANIPLE_WARNED", "unknown variables of which the launcher has warned, separated by commas"},
    // Variables of the tests and benchmarks.
    {"MANIPLE_TEST_AS", "what ranks of a test are: threads, processes, netns"},
    {"MANIPLE_TEST_BACKEND", "the backend that tests use"},
    {"MANIPLE_TEST_DEVICE", "cuda: tests of operations and of training run on a GPU"},
    {"MANIPLE_TEST_CHILD", "makes a test program a rank of a run"},
    {"MANIPLE_TEST_FILES", "the source files whose tests a test program runs"},
    {"MANIPLE_TEST_FOLDER", "a folder that the processes of a test share"},
    {"MANIPLE_FUZZ_SEEDS", "where fuzzers write their seeds"},
    {"MANIPLE_BENCH_OVERLAP", "how the training benchmark overlaps"},
    {"MANIPLE_BENCH_VERBOSE", "the training benchmark says more"},
    // Not read by Maniple: module systems and CMake's find_package use these names for an installation.
    {"MANIPLE_ROOT", "where Maniple is installed"},
    {"MANIPLE_DIR", "where Maniple is installed"},
    {"MANIPLE_HOME", "where Maniple is installed"},
};

bool is_known(std::string_view name) {
  const auto same = [&](const auto& entry) { return name == entry.name; };
  return std::any_of(knobs().begin(), knobs().end(), same) ||
         std::any_of(std::begin(kOwnVariables), std::end(kOwnVariables), same);
}

std::string upper_case(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return result;
}

std::set<std::string, std::less<>> warned_of() {
  std::set<std::string, std::less<>> names;
  const std::string list = environment_text(kWarned).value_or("");
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    names.insert(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

void warn(const std::vector<std::string>& unknown) {
  if (!unknown.empty()) log_warning("{} `maniple knobs` lists what can be set", describe_unknown(unknown));
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j - 1] + 1, row[j] + 1, replaced});
    }
  }
  return row.back();
}

std::span<const OwnVariable> own_variables() noexcept { return kOwnVariables; }

std::vector<std::string> unknown_variables(std::span<const std::string> environment) {
  const auto warned = warned_of();
  std::set<std::string> names;
  for (const std::string_view entry : environment) {
    const std::string_view name = entry.substr(0, entry.find('='));
    if (name.starts_with(kPrefix) && !is_known(name) && !warned.contains(name)) names.emplace(name);
  }
  return {names.begin(), names.end()};
}

std::vector<std::string> unknown_variables() {
  std::vector<std::string> environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) environment.emplace_back(*entry);
  return unknown_variables(environment);
}

std::string_view nearest_variable(std::string_view name) {
  const std::string meant = upper_case(name);
  std::string_view nearest;
  std::size_t least = kFarthest + 1;
  const auto consider = [&](std::string_view candidate) {
    const std::size_t distance = edit_distance(meant, candidate);
    if (distance < least) nearest = candidate;
    least = std::min(least, distance);
  };
  for (const KnobInfo& knob : knobs()) consider(knob.name);
  for (const OwnVariable& variable : kOwnVariables) {
    if (variable.for_users) consider(variable.name);
  }
  return nearest;
}

std::string describe_unknown(std::span<const std::string> names) {
  std::vector<std::string> sentences;
  for (const std::string& name : names.first(std::min(names.size(), kMaxNamed))) {
    const std::string_view meant = nearest_variable(name);
    sentences.push_back(meant.empty() ? fmt::format("{} is not known.", shown(name))
                                      : fmt::format("{} is not known; did you mean {}?", shown(name), meant));
  }
  if (names.size() > kMaxNamed) sentences.push_back(fmt::format("Nor are {} others.", names.size() - kMaxNamed));
  return fmt::format("{}", fmt::join(sentences, " "));
}

void warn_of_unknown_variables() {
  static constinit std::atomic_flag warned;
  if (!warned.test_and_set()) warn(unknown_variables());
}

void warn_of_unknown_variables_for_children(std::span<const std::string> environment) {
  const std::vector<std::string> unknown = unknown_variables(environment);
  if (unknown.empty()) return;
  warn(unknown);
  auto warned = warned_of();
  warned.insert(unknown.begin(), unknown.end());
  ::setenv(kWarned, fmt::format("{}", fmt::join(warned, ",")).c_str(), 1);
}

}  // namespace maniple
