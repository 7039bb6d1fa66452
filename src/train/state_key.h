// The names of state: of modules' tensors, and of what an optimizer keeps for itself, a parameter group or a parameter.
// Checkpoints and messages between ranks hold them as text, which only this file composes and takes apart.
//
//   kind                                         of the optimizer
//   group.0.lr                                   of parameter group 0
//   group.0.parameter.3.exp_avg                  of parameter 3 of the group
//   group.0.parameter.model/3.weight.exp_avg     of the parameter "3.weight" in part "model" of a checkpoint
//
//   const StateKey key = StateKey::parse("group.0.parameter.3.exp_avg");
//   key.owner == StateOwner::of_parameter(0, 3);  key.field == "exp_avg";
#pragma once

#include <compare>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace maniple {

/// Whose state it is: the optimizer's (no group), a group's (no parameter) or a parameter's.
struct StateOwner {
  std::optional<std::size_t> group = {};
  std::string parameter = {};  ///< its index in the group, or its name

  static StateOwner of_group(std::size_t group) { return {group, {}}; }
  static StateOwner of_parameter(std::size_t group, std::size_t index) { return {group, std::to_string(index)}; }
  static StateOwner of_parameter(std::size_t group, std::string name) { return {group, std::move(name)}; }

  bool is_parameter() const noexcept { return !parameter.empty(); }
  std::optional<std::size_t> index() const;  ///< nullopt for a parameter that is named
  std::string text() const;                  ///< "group.0.parameter.3"

  friend auto operator<=>(const StateOwner&, const StateOwner&) = default;
};

struct StateKey {
  StateOwner owner;
  std::string field;

  /// Never fails, and text() is `text` again: what has another form is a field of the optimizer.
  static StateKey parse(std::string_view text);
  std::string text() const;

  friend auto operator<=>(const StateKey&, const StateKey&) = default;
};

// Fields in addition to those of LibTorch.
inline constexpr const char* kParametersField = "parameters";       // of a group: how many it has
inline constexpr const char* kSteppedField = "stepped";             // of a parameter that has state
inline constexpr const char* kMasterWeightField = "master_weight";  // of a parameter: its float32 copy

/// "encoder" and "0.weight": "encoder.0.weight". Without a prefix the name alone.
std::string dotted(std::string_view prefix, std::string_view name);
/// The name inside the first module: "fc.weight" for a wrapper's "module.fc.weight", or for "stage0.fc.weight".
std::string inner_name(std::string_view name);
/// "model" and "3.weight": "model/3.weight", a tensor in a part of a checkpoint.
std::string name_in_part(std::string_view part, std::string_view name);

/// Calls f(field, value) for the entries of a map from text whose owner has the text `owner`.
template <class Map, class F>
void for_each_field(const Map& map, const std::string& owner, const F& f) {
  const std::string prefix = owner + ".";
  for (auto entry = map.lower_bound(prefix); entry != map.end() && entry->first.starts_with(prefix); ++entry) {
    const std::string field = entry->first.substr(prefix.size());
    if (field.find('.') == std::string::npos) f(field, entry->second);  // others belong to the owner "w.x", not to "w"
  }
}

}  // namespace maniple
