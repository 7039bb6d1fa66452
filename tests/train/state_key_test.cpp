#include "train/state_key.h"

#include <map>
#include <vector>

#include <gtest/gtest.h>

namespace maniple {
namespace {

TEST(StateKey, NamesMatchSavedCheckpoints) {
  const std::vector<std::pair<StateKey, std::string>> names = {
      {{{}, "kind"}, "kind"},
      {{{}, "groups"}, "groups"},
      {{StateOwner::of_group(0), "lr"}, "group.0.lr"},
      {{StateOwner::of_group(12), kParametersField}, "group.12.parameters"},
      {{StateOwner::of_parameter(0, 3), "exp_avg"}, "group.0.parameter.3.exp_avg"},
      {{StateOwner::of_parameter(1, 0), kSteppedField}, "group.1.parameter.0.stepped"},
      {{StateOwner::of_parameter(1, 10), kMasterWeightField}, "group.1.parameter.10.master_weight"},
      {{StateOwner::of_parameter(0, "model/3.weight"), "exp_avg"}, "group.0.parameter.model/3.weight.exp_avg"},
      {{StateOwner::of_parameter(0, "model/a.parameter.b"), "step"}, "group.0.parameter.model/a.parameter.b.step"},
  };
  for (const auto& [key, text] : names) {
    EXPECT_EQ(key.text(), text);
    EXPECT_EQ(StateKey::parse(text), key) << text;
  }
}

TEST(StateKey, OtherTextIsAFieldOfTheOptimizer) {
  for (const char* text : {"", "group", "group.", "group.0", "group.x.lr", "group.-1.lr", "group.007.lr",
                           "group.99999999999999999999999.lr", "group.0.parameter.3", "group.0.parameter..step",
                           "groups.0.lr", "value", "names.0.lr"}) {
    const StateKey key = StateKey::parse(text);
    EXPECT_EQ(key.owner, StateOwner()) << text;
    EXPECT_EQ(key.field, text);
    EXPECT_EQ(key.text(), text);
  }
}

TEST(StateKey, AnOwnerHasAnIndexOrAName) {
  EXPECT_EQ(StateOwner::of_parameter(0, 3).index(), 3u);
  EXPECT_EQ(StateOwner::of_parameter(0, "model/3").index(), std::nullopt);
  EXPECT_EQ(StateOwner::of_parameter(0, "3.weight").index(), std::nullopt);
  EXPECT_EQ(StateOwner::of_group(0).index(), std::nullopt);
  EXPECT_TRUE(StateOwner::of_parameter(0, 3).is_parameter());
  EXPECT_FALSE(StateOwner::of_group(0).is_parameter());
}

TEST(StateKey, FieldsBelongToOneOwner) {
  const std::map<std::string, int> map = {{"group.0.lr", 1},
                                          {"group.0.parameters", 2},
                                          {"group.0.parameter.w.step", 3},
                                          {"group.0.parameter.w.a", 4},
                                          {"group.0.parameter.w.x.b", 5},
                                          {"group.0.parameter.w2.c", 6},
                                          {"group.00.lr", 7}};
  const auto fields = [&](const StateOwner& owner) {
    std::map<std::string, int> result;
    for_each_field(map, owner.text(), [&](const std::string& field, int value) { result[field] = value; });
    return result;
  };
  EXPECT_EQ(fields(StateOwner::of_group(0)), (std::map<std::string, int>{{"lr", 1}, {"parameters", 2}}));
  EXPECT_EQ(fields(StateOwner::of_parameter(0, "w")), (std::map<std::string, int>{{"step", 3}, {"a", 4}}));
  EXPECT_EQ(fields(StateOwner::of_parameter(0, "w.x")), (std::map<std::string, int>{{"b", 5}}));
}

TEST(StateKey, NamesOfModulesAreJoinedByDots) {
  EXPECT_EQ(dotted("encoder", "0.weight"), "encoder.0.weight");
  EXPECT_EQ(dotted("", "0.weight"), "0.weight");
  EXPECT_EQ(inner_name("module.fc.module.weight"), "fc.module.weight");
  EXPECT_EQ(inner_name("weight"), "weight");
  EXPECT_EQ(name_in_part("model", "3.weight"), "model/3.weight");
}

}  // namespace
}  // namespace maniple
