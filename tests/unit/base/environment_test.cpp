#include "base/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include <maniple/comm/error.h>

#include "harness/error_of.h"

namespace maniple {
namespace {

class Environment : public testing::Test {
 protected:
  void set(const char* name, const char* value) {
    ::setenv(name, value, 1);
    names_.insert(name);
  }
  ~Environment() override {
    for (const auto& name : names_) ::unsetenv(name.c_str());
  }

 private:
  std::set<std::string> names_;
};

TEST_F(Environment, TableIsInTheOrderOfTheEnumeration) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < knobs().size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(knobs()[i].knob), i) << knobs()[i].name;
    EXPECT_EQ(std::string(knobs()[i].name).rfind("MANIPLE_", 0), 0u);
    EXPECT_TRUE(names.insert(knobs()[i].name).second) << "twice: " << knobs()[i].name;
    EXPECT_FALSE(std::string(knobs()[i].meaning).empty());
  }
}

TEST_F(Environment, UnsetAndEmptyGiveTheDefault) {
  ::unsetenv("MANIPLE_TCP_STREAMS");
  EXPECT_EQ(knob_integer(Knob::tcp_streams, 1, 16), 2);
  set("MANIPLE_TCP_STREAMS", "");
  EXPECT_EQ(knob_integer(Knob::tcp_streams, 1, 16), 2);
  EXPECT_EQ(knob_text(Knob::tcp_streams), "2");
}

TEST_F(Environment, ValuesAreRead) {
  set("MANIPLE_TCP_STREAMS", "16");
  EXPECT_EQ(knob_integer(Knob::tcp_streams, 1, 16), 16);
  set("MANIPLE_HEARTBEAT", "0.25");
  EXPECT_EQ(knob_number(Knob::heartbeat_s, 0, 1e6), 0.25);
  set("MANIPLE_CHECKS", "0");
  EXPECT_FALSE(knob_flag(Knob::checks));
}

TEST_F(Environment, NonsenseIsAnErrorThatNamesVariableValueAndRange) {
  for (const char* text : {"17", "0", "-3", "two", "2x", "2.5", " 2", "99999999999999999999"}) {
    set("MANIPLE_TCP_STREAMS", text);
    EXPECT_EQ(error_of([] { knob_integer(Knob::tcp_streams, 1, 16); }),
              "MANIPLE_TCP_STREAMS is \"" + std::string(text) + "\"; expected a whole number from 1 to 16");
  }
  for (const char* text : {"nan", "-1", "1e7", "soon", "1s"}) {
    set("MANIPLE_HEARTBEAT", text);
    EXPECT_EQ(error_of([] { knob_number(Knob::heartbeat_s, 0, 60); }),
              "MANIPLE_HEARTBEAT is \"" + std::string(text) + "\"; expected a number from 0 to 60");
  }
  set("MANIPLE_CHECKS", "yes");
  EXPECT_EQ(error_of([] { knob_flag(Knob::checks); }),
            "MANIPLE_CHECKS is \"yes\"; expected a whole number from 0 to 1");
}

TEST_F(Environment, PlainVariables) {
  ::unsetenv("MANIPLE_UNIT_TEST");
  EXPECT_EQ(environment_text("MANIPLE_UNIT_TEST"), std::nullopt);
  EXPECT_EQ(environment_integer("MANIPLE_UNIT_TEST", 0, 9), std::nullopt);
  set("MANIPLE_UNIT_TEST", "");
  EXPECT_EQ(environment_text("MANIPLE_UNIT_TEST"), std::nullopt);
  EXPECT_EQ(environment_integer("MANIPLE_UNIT_TEST", 0, 9), std::nullopt);
  set("MANIPLE_UNIT_TEST", "7");
  EXPECT_EQ(environment_text("MANIPLE_UNIT_TEST"), "7");
  EXPECT_EQ(environment_integer("MANIPLE_UNIT_TEST", 0, 9), 7);
  set("MANIPLE_UNIT_TEST", "10");
  EXPECT_EQ(error_of([] { environment_integer("MANIPLE_UNIT_TEST", 0, 9); }),
            "MANIPLE_UNIT_TEST is \"10\"; expected a whole number from 0 to 9");
}

}  // namespace
}  // namespace maniple
