// Names of state: of a module's tensors, and of the state that an optimizer keeps for itself, a parameter group or a
// parameter. Checkpoints and messages between ranks hold them as text. Only this file composes and parses that text.
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

/// The owner of state: the optimizer (no group), a group (no parameter) or a parameter.
struct StateOwner {
  std::optional<std::size_t> group = {};
  std::string parameter = {};  ///< its index in the group, or its name

  static StateOwner of_group(std::size_t group) { return {group, {}}; }
  static StateOwner of_parameter(std::size_t group, std::size_t index) { return {group, std::to_string(index)}; }
  static StateOwner of_parameter(std::size_t group, std::string name) { return {group, std::move(name)}; }

  bool is_parameter() const noexcept { return !parameter.empty(); }
  std::optional<std::size_t> index() const;  ///< nullopt for a parameter identified by name
  std::string text() const;                  ///< "group.0.parameter.3"

  friend auto operator<=>(const StateOwner&, const StateOwner&) = default;
};

struct StateKey {
  StateOwner owner;
  std::string field;

  /// Never fails, and text() returns `text` unchanged: text in any other form is a field of the optimizer.
  static StateKey parse(std::string_view text);
  std::string text() const;

  friend auto operator<=>(const StateKey&, const StateKey&) = default;
};

// Fields that LibTorch does not have.
inline constexpr const char* kParametersField = "parameters";       // of a group: its number of parameters
inline constexpr const char* kSteppedField = "stepped";             // of a parameter with state
inline constexpr const char* kMasterWeightField = "master_weight";  // of a parameter: its float32 copy

/// Joins a prefix and a name: "encoder" and "0.weight" give "encoder.0.weight". An empty prefix gives the name alone.
std::string dotted(std::string_view prefix, std::string_view name);
/// The name inside the outermost module: "fc.weight" for a wrapper's "module.fc.weight", or for "stage0.fc.weight".
std::string inner_name(std::string_view name);
/// The name of a tensor in a part of a checkpoint: "model" and "3.weight" give "model/3.weight".
std::string name_in_part(std::string_view part, std::string_view name);

/// Calls f(field, value) for each entry of a map keyed by text whose owner's text is `owner`.
template <class Map, class F>
void for_each_field(const Map& map, const std::string& owner, const F& f) {
  const std::string prefix = owner + ".";
  for (auto entry = map.lower_bound(prefix); entry != map.end() && entry->first.starts_with(prefix); ++entry) {
    const std::string field = entry->first.substr(prefix.size());
    if (field.find('.') == std::string::npos) f(field, entry->second);  // others belong to the owner "w.x", not to "w"
  }
}

}  // namespace maniple
