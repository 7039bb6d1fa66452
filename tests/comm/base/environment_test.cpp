#include "comm/base/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>

#include <fmt/format.h>

#include <maniple/comm/error.h>

#include "harness/error_of.h"

namespace maniple {
namespace {

class Environment : public testing::Test {
 protected:
  void set(const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), 1);
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
    EXPECT_FALSE(to_string(knobs()[i].permitted).empty()) << knobs()[i].name;
  }
}

TEST_F(Environment, DefaultsArePermitted) {
  for (const KnobInfo& knob : knobs()) {
    EXPECT_TRUE(is_permitted(knob.permitted, knob.default_text)) << knob.name;
    EXPECT_LE(knob.permitted.low, knob.permitted.high) << knob.name;
    // Whole numbers are kept as double, which holds them exactly up to here; and shown without a fraction.
    EXPECT_LE(knob.permitted.high, 9007199254740992.0) << knob.name;
    EXPECT_EQ(knob.permitted.low, static_cast<double>(static_cast<std::int64_t>(knob.permitted.low))) << knob.name;
    EXPECT_EQ(knob.permitted.high, static_cast<double>(static_cast<std::int64_t>(knob.permitted.high))) << knob.name;
  }
}

TEST_F(Environment, UnsetAndEmptyGiveTheDefault) {
  ::unsetenv("MANIPLE_TCP_STREAMS");
  EXPECT_EQ(knob_integer(Knob::tcp_streams), 2);
  for (const KnobInfo& knob : knobs()) set(knob.name, "");
  EXPECT_EQ(wrong_knobs(environment_text), std::vector<std::string>());
  EXPECT_EQ(knob_integer(Knob::tcp_streams), 2);
  EXPECT_EQ(knob_text(Knob::tcp_streams), "2");
  EXPECT_EQ(knob_number(Knob::heartbeat_s), 2.5);
  EXPECT_EQ(knob_word(Knob::mpi), "auto");
  EXPECT_EQ(knob_text(Knob::plugins), "");
  EXPECT_TRUE(knob_flag(Knob::checks));
}

TEST_F(Environment, ValuesAreRead) {
  set("MANIPLE_TCP_STREAMS", "16");
  EXPECT_EQ(knob_integer(Knob::tcp_streams), 16);
  set("MANIPLE_MPI_PIECE", "268435456");
  EXPECT_EQ(knob_integer(Knob::mpi_piece), std::int64_t{1} << 28);
  set("MANIPLE_HEARTBEAT", "0.25");
  EXPECT_EQ(knob_number(Knob::heartbeat_s), 0.25);
  set("MANIPLE_HEARTBEAT", "1e3");
  EXPECT_EQ(knob_number(Knob::heartbeat_s), 1000);
  set("MANIPLE_SPIN_US", "-1");
  EXPECT_EQ(knob_number(Knob::spin_us), -1);
  set("MANIPLE_SPIN_US", "0.5");
  EXPECT_EQ(knob_number(Knob::spin_us), 0.5);
  set("MANIPLE_CHECKS", "0");
  EXPECT_FALSE(knob_flag(Knob::checks));
  set("MANIPLE_MPI", "mpich");
  EXPECT_EQ(knob_word(Knob::mpi), "mpich");
  set("MANIPLE_HOST", " any text: 1 ");
  EXPECT_EQ(knob_text(Knob::host), " any text: 1 ");
  EXPECT_EQ(wrong_knobs(environment_text), std::vector<std::string>());
}

// What people write by mistake. Zero with a sign is zero.
TEST_F(Environment, EveryKindRefusesNonsense) {
  const std::map<Knob, std::vector<std::string>> wrong = {
      {Knob::tcp_streams,
       {"17",
        "0",
        "-0",
        "-3",
        "two",
        "2x",
        "1x",
        "2.5",
        "2.",
        " 2",
        "2 ",
        " ",
        "\t",
        "+2",
        "0x10",
        "1e1",
        "1e3",
        "nan",
        "inf",
        "99999999999999999999",
        "-99999999999999999999",
        "2\n",
        "2,3",
        "true"}},
      {Knob::stage_kib, {"1", "15", "-1", "-16", "1048577", "16.0", "0.0", "16K", "auto"}},
      {Knob::heartbeat_s, {"nan", "-nan", "inf", "-inf", "-1",   "-0.1",  "1e7", "1e999", "soon", "1s", "1x",
                           " 1",  "1 ",   " ",   "+1",   "0x10", "0x1p3", "1,5", "2.5.1", "1e",   "."}},
      {Knob::spin_us, {"-2", "-0.5", "-1.5", "1000001", "auto", "nan"}},
      {Knob::checks,
       {"yes", "no", "true", "on", "2", "-1", "-0", "00", "01", "1.0", " 1", "1 ", " ", "1x", "0x1", "nan", "1e0"}},
      {Knob::log,
       {"loud", "Warning", "DEBUG", "warnings", "warn", " info", "info ", " ", "debug,info", "0", "debug, info"}},
      {Knob::transport, {"udp", "TCP", "shared"}},
      {Knob::mkldnn, {"perhaps", "1", "onn"}},
      {Knob::mpi, {"intel", "openmpi5"}},
      {Knob::host, {std::string(256, 'h'), std::string(100000, 'h')}},
  };
  for (const auto& [knob, texts] : wrong) {
    for (const std::string& text : texts) {
      EXPECT_FALSE(is_permitted(info(knob).permitted, text)) << info(knob).name << "=" << text;
      set(info(knob).name, text);
      const auto sentences = wrong_knobs(environment_text);
      ASSERT_EQ(sentences.size(), 1u) << info(knob).name << "=" << text;
      const std::string beginning = fmt::format("{} is \"{}\"", info(knob).name, shown(text));
      EXPECT_EQ(sentences[0].rfind(beginning, 0), 0u) << sentences[0];
      EXPECT_NE(sentences[0].find("; expected "), std::string::npos) << sentences[0];
    }
    set(info(knob).name, "");
  }
  for (const char* zero : {"0", "-0", "000"}) EXPECT_TRUE(is_permitted(info(Knob::recorder).permitted, zero)) << zero;
  for (const char* zero : {"0", "-0", "0.0", "-0.0", "0e5"})
    EXPECT_TRUE(is_permitted(info(Knob::heartbeat_s).permitted, zero)) << zero;
}

TEST_F(Environment, ErrorsNameVariableValueAndExpectation) {
  set("MANIPLE_TCP_STREAMS", "17");
  EXPECT_EQ(error_of([] { knob_integer(Knob::tcp_streams); }),
            "MANIPLE_TCP_STREAMS is \"17\"; expected a whole number from 1 to 16");
  set("MANIPLE_STAGE_KIB", "8");
  EXPECT_EQ(error_of([] { knob_integer(Knob::stage_kib); }),
            "MANIPLE_STAGE_KIB is \"8\"; expected 0 or a whole number from 16 to 1048576");
  set("MANIPLE_HEARTBEAT", "1s");
  EXPECT_EQ(error_of([] { knob_number(Knob::heartbeat_s); }),
            "MANIPLE_HEARTBEAT is \"1s\"; expected a number from 0 to 1000000");
  set("MANIPLE_SPIN_US", "-0.5");
  EXPECT_EQ(error_of([] { knob_number(Knob::spin_us); }),
            "MANIPLE_SPIN_US is \"-0.5\"; expected -1 or a number from 0 to 1000000");
  set("MANIPLE_CHECKS", "yes");
  EXPECT_EQ(error_of([] { knob_flag(Knob::checks); }), "MANIPLE_CHECKS is \"yes\"; expected 0 or 1");
  set("MANIPLE_MPI", "intel");
  EXPECT_EQ(error_of([] { knob_word(Knob::mpi); }), "MANIPLE_MPI is \"intel\"; expected one of auto, openmpi, mpich");
  set("MANIPLE_HOST", std::string(300, 'h'));
  EXPECT_EQ(wrong_knobs(environment_text).at(5),
            "MANIPLE_HOST is \"" + std::string(80, 'h') + "...\", 300 bytes; expected at most 255");
  EXPECT_EQ(wrong_knobs(environment_text).size(), 7u);
  EXPECT_EQ(wrong_knobs([](const char*) { return std::nullopt; }).size(), 0u) << "another environment";
}

TEST_F(Environment, PermittedValuesAsText) {
  EXPECT_EQ(to_string(info(Knob::checks).permitted), "0 or 1");
  EXPECT_EQ(to_string(info(Knob::tcp_streams).permitted), "1 to 16");
  EXPECT_EQ(to_string(info(Knob::stage_kib).permitted), "0 or 16 to 1048576");
  EXPECT_EQ(to_string(info(Knob::heartbeat_s).permitted), "number, 0 to 1000000");
  EXPECT_EQ(to_string(info(Knob::spin_us).permitted), "number, -1 or 0 to 1000000");
  EXPECT_EQ(to_string(info(Knob::mpi).permitted), "auto, openmpi, mpich");
  EXPECT_EQ(to_string(info(Knob::plugins).permitted), "a folder");
  EXPECT_EQ(to_string(info(Knob::host).permitted), "a name, up to 255 bytes");
}

TEST_F(Environment, ValuesAreShownInOneLine) {
  EXPECT_EQ(shown("plain"), "plain");
  EXPECT_EQ(shown("two\nlines\x1b[31m\x7f"), "two\\x0alines\\x1b[31m\\x7f");
  EXPECT_EQ(shown("größer"), "größer");
  EXPECT_EQ(shown(std::string(200, 'x')), std::string(80, 'x') + "...");
  set("MANIPLE_CHECKS", "1\n");
  EXPECT_EQ(error_of([] { knob_flag(Knob::checks); }), "MANIPLE_CHECKS is \"1\\x0a\"; expected 0 or 1");
}

TEST_F(Environment, PlainVariables) {
  ::unsetenv("UNIT_TEST_VARIABLE");
  EXPECT_EQ(environment_text("UNIT_TEST_VARIABLE"), std::nullopt);
  EXPECT_EQ(environment_integer("UNIT_TEST_VARIABLE", 0, 9), std::nullopt);
  set("UNIT_TEST_VARIABLE", "");
  EXPECT_EQ(environment_text("UNIT_TEST_VARIABLE"), std::nullopt);
  EXPECT_EQ(environment_integer("UNIT_TEST_VARIABLE", 0, 9), std::nullopt);
  set("UNIT_TEST_VARIABLE", "7");
  EXPECT_EQ(environment_text("UNIT_TEST_VARIABLE"), "7");
  EXPECT_EQ(environment_integer("UNIT_TEST_VARIABLE", 0, 9), 7);
  set("UNIT_TEST_VARIABLE", "10");
  EXPECT_EQ(error_of([] { environment_integer("UNIT_TEST_VARIABLE", 0, 9); }),
            "UNIT_TEST_VARIABLE is \"10\"; expected a whole number from 0 to 9");
}

}  // namespace
}  // namespace maniple
