#include "comm/session/past_groups.h"

#include <gtest/gtest.h>

namespace maniple {
namespace {

TEST(PastGroups, GroupsOfThePastAreToldFromThoseToCome) {
  PastGroups groups;
  EXPECT_FALSE(groups.contains("world"));
  EXPECT_FALSE(groups.contains("world/0"));
  groups.add("world");
  groups.add("world/0");
  EXPECT_FALSE(groups.contains("world/0"));
  EXPECT_FALSE(groups.contains("world/1"));
  groups.remove("world/0");
  EXPECT_TRUE(groups.contains("world/0"));
  EXPECT_TRUE(groups.contains("world/0/3")) << "made from it by others";
  EXPECT_FALSE(groups.contains("world/1"));
  groups.skip("world/1");
  groups.add("world/2.7");
  EXPECT_TRUE(groups.contains("world/1"));
  EXPECT_TRUE(groups.contains("world/2.6")) << "this rank is in the one of another colour";
  EXPECT_FALSE(groups.contains("world/2.7"));
  EXPECT_FALSE(groups.contains("world/3"));
}

TEST(PastGroups, AGroupMayOutliveItsParent) {
  PastGroups groups;
  groups.add("world");
  groups.add("world/0");
  groups.add("world/0/0");
  groups.remove("world/0");
  EXPECT_FALSE(groups.contains("world/0/0"));
  groups.remove("world/0/0");
  EXPECT_TRUE(groups.contains("world/0/0"));
  groups.remove("world");
  EXPECT_TRUE(groups.contains("world"));
  EXPECT_TRUE(groups.contains("world/17"));
}

TEST(PastGroups, NamesThatOnlyLookNumberedAreNotCompared) {
  PastGroups groups;
  groups.add("world");
  groups.add("mine/7");
  EXPECT_FALSE(groups.contains("mine/3"));
  groups.remove("mine/7");
  EXPECT_TRUE(groups.contains("mine/7"));
  EXPECT_FALSE(groups.contains("mine/3"));
  EXPECT_FALSE(groups.contains("world/x"));
  EXPECT_FALSE(groups.contains("world/"));
  EXPECT_FALSE(groups.contains(""));
}

}  // namespace
}  // namespace maniple
