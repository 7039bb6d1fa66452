// Tests MANIPLE_TEST_FILES, which selects the tests of some of a program's files. This program has two: this one and
// harness_test.cpp.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdio>
#include <string>

#include <fmt/format.h>

#include "comm/base/files.h"

namespace maniple::harness {
namespace {

struct Listed {
  std::string text;
  int exit_code = -1;

  bool has(const std::string& suite) const { return text.find(suite + ".\n") != std::string::npos; }
};

Listed listed(const std::string& files, const std::string& filter = "*") {
  const std::string command =
      fmt::format("MANIPLE_TEST_FILES='{}' GTEST_OUTPUT= '{}' --gtest_list_tests '--gtest_filter={}' 2>&1", files,
                  link_target("/proc/self/exe"), filter);
  Listed result;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) result.text += static_cast<char>(c);
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

TEST(FileFilter, TestsOfOtherFilesAreLeftOut) {
  const Listed own = listed("file_filter_test.cpp");
  EXPECT_EQ(own.exit_code, 0);
  EXPECT_TRUE(own.has("FileFilter") && !own.has("Processes")) << own.text;
  const Listed other = listed("harness_test.cpp");
  EXPECT_TRUE(!other.has("FileFilter") && other.has("Processes")) << other.text;
  const Listed both = listed("harness_test.cpp file_filter_test.cpp");
  EXPECT_TRUE(both.has("FileFilter") && both.has("Processes")) << both.text;
}

TEST(FileFilter, AFilterStillCounts) {
  const Listed one = listed("file_filter_test.cpp", "*StillCounts*-Processes.*");
  EXPECT_TRUE(one.has("FileFilter")) << one.text;
  EXPECT_NE(one.text.find("AFilterStillCounts"), std::string::npos) << one.text;
  EXPECT_EQ(one.text.find("TestsOfOtherFiles"), std::string::npos) << one.text;
}

TEST(FileFilter, AFileWithoutTestsIsAMistake) {
  const Listed none = listed("harness_test.cpp no_such_test.cpp");
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.text.find("no test in a file called no_such_test.cpp"), std::string::npos) << none.text;
}

}  // namespace
}  // namespace maniple::harness
