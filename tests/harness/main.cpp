// main() of every program that uses run_ranks, both for the test program itself and for its ranks.
#include <gtest/gtest.h>

#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

#include "harness/failures.h"
#include "harness/modes.h"

namespace {

/// Applies MANIPLE_TEST_FILES: a program contains several test sources, and each is a separate entry in ctest. Of the
/// tests that the filter selects, only tests in these files (names without folders, separated by blanks) run. Returns
/// false, with a message on stderr, if one of the files contains no test of this program.
bool select_files(std::string_view names) {
  std::map<std::string, int, std::less<>> tests_in;
  std::istringstream in{std::string(names)};
  for (std::string name; in >> name;) tests_in[name] = 0;

  std::string others;
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  for (int s = 0; s < program.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *program.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string_view path = test.file();
      const auto found = tests_in.find(path.substr(path.rfind('/') + 1));
      if (found != tests_in.end()) {
        ++found->second;
      } else {
        others += std::string(":") + suite.name() + "." + test.name();
      }
    }
  }
  for (const auto& [name, count] : tests_in) {
    if (count > 0) continue;
    std::fprintf(stderr, "MANIPLE_TEST_FILES: this program has no test in a file called %s\n", name.c_str());
    return false;
  }
  std::string filter = testing::GTEST_FLAG(filter);
  if (!others.empty()) filter += (filter.find('-') == std::string::npos ? "-" : "") + others;
  testing::GTEST_FLAG(filter) = filter;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* files = std::getenv("MANIPLE_TEST_FILES"); files != nullptr && !select_files(files)) return 2;
  const auto& mode = maniple::harness::child_mode();
  if (mode) {
    // The parent prints the results; a rank must not outlive it.
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  }
  maniple::harness::install_listener();
  const int result = RUN_ALL_TESTS();
  if (!mode) return result;
  std::fprintf(stderr, "rank %d: the test ended before its run_ranks call number %d\n", mode->rank, mode->run_index);
  return 3;
}
