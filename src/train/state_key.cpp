#include "train/state_key.h"

#include <charconv>

#include "comm/base/format.h"

namespace maniple {
namespace {

constexpr std::string_view kGroup = "group.", kParameter = "parameter.";

/// Parses a number in the form that std::to_string prints.
std::optional<std::size_t> natural_number(std::string_view text) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || std::to_string(value) != text) return std::nullopt;
  return value;
}

}  // namespace

std::optional<std::size_t> StateOwner::index() const { return natural_number(parameter); }

std::string StateOwner::text() const {
  if (!group) return {};
  return is_parameter() ? format_text("{}{}.{}{}", kGroup, *group, kParameter, parameter)
                        : format_text("{}{}", kGroup, *group);
}

StateKey StateKey::parse(std::string_view text) {
  const StateKey other{{}, std::string(text)};
  if (!text.starts_with(kGroup)) return other;
  std::string_view rest = text.substr(kGroup.size());
  const std::size_t end_of_group = rest.find('.');
  const auto group = natural_number(rest.substr(0, end_of_group));
  if (end_of_group == std::string_view::npos || !group) return other;
  rest.remove_prefix(end_of_group + 1);
  if (!rest.starts_with(kParameter)) return {StateOwner::of_group(*group), std::string(rest)};
  rest.remove_prefix(kParameter.size());
  const std::size_t dot = rest.rfind('.');  // names of parameters contain dots, fields do not
  if (dot == std::string_view::npos || dot == 0) return other;
  return {StateOwner::of_parameter(*group, std::string(rest.substr(0, dot))), std::string(rest.substr(dot + 1))};
}

std::string StateKey::text() const { return dotted(owner.text(), field); }

std::string dotted(std::string_view prefix, std::string_view name) {
  return prefix.empty() ? std::string(name) : format_text("{}.{}", prefix, name);
}
std::string inner_name(std::string_view name) { return std::string(name.substr(name.find('.') + 1)); }
std::string name_in_part(std::string_view part, std::string_view name) { return format_text("{}/{}", part, name); }

}  // namespace maniple
