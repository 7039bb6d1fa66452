#include "comm/session/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace maniple {
namespace {

using testing::HasSubstr;

std::vector<SettingsOf> three_ranks() {
  const Settings settings = settings_of_this_rank({.knobs = {}, .backend = "native"});
  return {{"node1", "rank 0 (pid 10 on node1)", settings},
          {"node2", "rank 1 (pid 11 on node2)", settings},
          {"node3", "rank 2 (pid 12 on node3)", settings}};
}

TEST(Settings, AreAlikeByDefault) { EXPECT_EQ(difference(three_ranks()), ""); }

TEST(Settings, EveryKnobOfTheWorldIsCompared) {
  int compared = 0;
  for (const KnobInfo& knob : knobs()) {
    std::vector<SettingsOf> ranks = three_ranks();
    const auto is_of_knob = [&](const Setting& setting) {
      return setting.name.substr(0, setting.name.find(' ')) == knob.name;
    };
    auto& settings = ranks[1].settings;
    const auto it = std::find_if(settings.begin(), settings.end(), is_of_knob);
    ASSERT_EQ(it != settings.end(), knob.scope == Scope::world) << knob.name;
    if (it == settings.end()) continue;
    ++compared;
    it->value = "another";
    const std::string text = difference(ranks);
    EXPECT_THAT(text, HasSubstr(knob.name));
    EXPECT_THAT(text,
                HasSubstr(" on ranks 0, 2 (node1, node3) but another on rank 1 (pid 11 on node2); it must be alike"));
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
  EXPECT_GE(compared, 5);
}

TEST(Settings, VersionBackendAndByteOrderAreCompared) {
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<SettingsOf> ranks = three_ranks();
    ranks[2].settings[i].value = "another";
    EXPECT_THAT(difference(ranks), HasSubstr("another on rank 2 (pid 12 on node3)")) << i;
  }
}

// A rank of another version has other settings, which say nothing.
TEST(Settings, OfAnotherVersionOnlyTheVersionIsNamed) {
  std::vector<SettingsOf> ranks = three_ranks();
  ranks[1].settings = {{ranks[1].settings[0].name, "9.9.9"}, {"MANIPLE_NEW", "1"}};
  EXPECT_FALSE(of_this_version(ranks[1].settings));
  EXPECT_TRUE(of_this_version(ranks[0].settings));
  const std::string text = difference(ranks);
  EXPECT_THAT(text, HasSubstr("the version of Maniple is "));
  EXPECT_EQ(text.find("MANIPLE_"), std::string::npos) << text;
}

TEST(Settings, AllThatDifferAreNamed) {
  std::vector<SettingsOf> ranks = three_ranks();
  for (SettingsOf& rank : ranks) {
    for (std::size_t i = 1; i < rank.settings.size(); ++i) rank.settings[i].value += rank.host;
  }
  const std::string text = difference(ranks);
  for (std::size_t i = 1; i < ranks[0].settings.size(); ++i) EXPECT_THAT(text, HasSubstr(ranks[0].settings[i].name));
}

TEST(Settings, AreComparedByMeaning) {
  EXPECT_EQ(canonical_text(info(Knob::heartbeat_s), ""), "2.5");
  EXPECT_EQ(canonical_text(info(Knob::heartbeat_s), "2.50"), "2.5");
  EXPECT_EQ(canonical_text(info(Knob::heartbeat_s), "6e1"), canonical_text(info(Knob::heartbeat_s), "60"));
  EXPECT_EQ(canonical_text(info(Knob::heartbeat_s), "-0.0"), canonical_text(info(Knob::heartbeat_s), "0"));
  EXPECT_EQ(canonical_text(info(Knob::mpi_piece), "0007"), "7");
  EXPECT_EQ(canonical_text(info(Knob::transport), ""), "auto");
  EXPECT_EQ(canonical_text(info(Knob::encrypt), ""), "0");
}

}  // namespace
}  // namespace maniple
