#include "comm/base/own_variables.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "comm/base/environment.h"

namespace maniple {
namespace {

using Names = std::vector<std::string>;

class OwnVariables : public testing::Test {
 protected:
  OwnVariables() { ::unsetenv("MANIPLE_WARNED"); }
  ~OwnVariables() override { ::unsetenv("MANIPLE_WARNED"); }
};

TEST_F(OwnVariables, NoNameIsInBothTables) {
  std::set<std::string> names;
  for (const KnobInfo& knob : knobs()) names.insert(knob.name);
  for (const OwnVariable& variable : own_variables()) {
    EXPECT_TRUE(names.insert(variable.name).second) << "twice: " << variable.name;
    EXPECT_EQ(std::string(variable.name).rfind("MANIPLE_", 0), 0u) << variable.name;
    EXPECT_FALSE(std::string(variable.meaning).empty()) << variable.name;
  }
}

TEST_F(OwnVariables, UnknownOnesAreFound) {
  const Names environment = {"MANIPLE_ZZZ=1",
                             "HOME=/h",
                             "MANIPLE_TCP_STREAMS=2",
                             "MANIPLE_HEARTBEATS=",
                             "MANIPLE_JOB=a",
                             "MANIPLE_WARNED=",
                             "MANIPLE_=1",
                             "MANIPLE=1",
                             "XMANIPLE_LOG=1",
                             "MANIPLE_TEST_AS=threads",
                             "MANIPLE_log=1",
                             "MANIPLE_ROOT",
                             "no assignment"};
  EXPECT_EQ(unknown_variables(environment), (Names{"MANIPLE_", "MANIPLE_HEARTBEATS", "MANIPLE_ZZZ", "MANIPLE_log"}));
  Names all;
  for (const KnobInfo& knob : knobs()) all.push_back(std::string(knob.name) + "=1");
  for (const OwnVariable& own : own_variables()) all.push_back(std::string(own.name) + "=1");
  EXPECT_EQ(unknown_variables(all), Names());
}

TEST_F(OwnVariables, ReportedNamesAreNotRepeated) {
  ::setenv("MANIPLE_WARNED", "MANIPLE_A,MANIPLE_C,,", 1);
  EXPECT_EQ(unknown_variables(Names{"MANIPLE_A=1", "MANIPLE_B=1", "MANIPLE_C=1"}), Names{"MANIPLE_B"});
}

TEST_F(OwnVariables, TheNearestNameIsProposed) {
  const std::pair<const char*, const char*> kMeant[] = {
      {"MANIPLE_HEARTBEATS", "MANIPLE_HEARTBEAT"},
      {"MANIPLE_HEART_BEAT", "MANIPLE_HEARTBEAT"},
      {"MANIPLE_HEARTBEAT_SECONDS", ""},
      {"MANIPLE_STAGE_KB", "MANIPLE_STAGE_KIB"},
      {"MANIPLE_LOG_LEVEL", ""},
      {"MANIPLE_log", "MANIPLE_LOG"},
      {"MANIPLE_TCP_STREAM", "MANIPLE_TCP_STREAMS"},
      {"MANIPLE_STREAMS", ""},
      {"MANIPLE_TCP_BUFFER_KB", "MANIPLE_TCP_BUFFER_KIB"},
      {"MANIPLE_TCP_NODELAY", ""},
      {"MANIPLE_MPI_PIECES", "MANIPLE_MPI_PIECE"},
      {"MANIPLE_SECRET", ""},
      {"MANIPLE_SECRET_FILES", "MANIPLE_SECRET_FILE"},
      {"MANIPLE_ALGORITM", "MANIPLE_ALGORITHM"},
      {"MANIPLE_INTERFACES", "MANIPLE_INTERFACE"},
      {"MANIPLE_TEST_BACKENDS", ""},
      {"MANIPLE_FROBNICATE", ""},
      {"MANIPLE_", ""},
  };
  for (const auto& [name, meant] : kMeant) EXPECT_EQ(nearest_variable(name), meant) << name;
}

TEST_F(OwnVariables, OneLineNamesThemAll) {
  EXPECT_EQ(describe_unknown(Names{"MANIPLE_FROBNICATE", "MANIPLE_HEARTBEATS"}),
            "MANIPLE_FROBNICATE is not known. MANIPLE_HEARTBEATS is not known; did you mean MANIPLE_HEARTBEAT?");
  EXPECT_EQ(describe_unknown(Names{"MANIPLE_\n\x1b"}), "MANIPLE_\\x0a\\x1b is not known.");
  Names many;
  for (int i = 0; i < 100; ++i) many.push_back("MANIPLE_QQQQ" + std::to_string(i));
  const std::string text = describe_unknown(many);
  EXPECT_NE(text.find("MANIPLE_QQQQ7 is not known. Nor are 92 others."), std::string::npos) << text;
}

TEST_F(OwnVariables, ChildrenInheritWhichNamesWereReported) {
  testing::internal::CaptureStderr();
  warn_of_unknown_variables_for_children(Names{"MANIPLE_FROBBED=1", "MANIPLE_LOG=info"});
  warn_of_unknown_variables_for_children(Names{"MANIPLE_FROBBED=1", "MANIPLE_LOG=info"});
  warn_of_unknown_variables_for_children(Names{"MANIPLE_FROBBED=1", "MANIPLE_BLUBBER=1"});
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "maniple: warning: MANIPLE_FROBBED is not known. `maniple knobs` lists what can be set\n"
            "maniple: warning: MANIPLE_BLUBBER is not known. `maniple knobs` lists what can be set\n");
  EXPECT_STREQ(std::getenv("MANIPLE_WARNED"), "MANIPLE_BLUBBER,MANIPLE_FROBBED");
}

}  // namespace
}  // namespace maniple
