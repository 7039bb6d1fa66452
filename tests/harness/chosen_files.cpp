#include "harness/chosen_files.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <sstream>
#include <string>

namespace maniple::harness {

bool choose_files(std::string_view names) {
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

}  // namespace maniple::harness
