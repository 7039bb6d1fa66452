#include "comm/session/past_groups.h"

#include <algorithm>
#include <charconv>

namespace maniple {

std::optional<PastGroups::Numbered> PastGroups::parse(std::string_view name) {
  const auto slash = name.rfind('/');
  if (slash == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(slash + 1);
  Numbered result{std::string(name.substr(0, slash)), 0};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), result.number);
  const bool whole = end == digits.data() + digits.size() || *end == '.';
  if (error != std::errc() || !whole) return std::nullopt;
  return result;
}

bool PastGroups::note_number(const std::string& name) {
  const auto numbered = parse(name);
  if (!numbered || present_.count(numbered->parent) == 0) return false;
  auto [it, is_first] = last_.emplace(numbered->parent, numbered->number);
  it->second = std::max(it->second, numbered->number);
  return true;
}

void PastGroups::add(const std::string& name) {
  note_number(name);
  present_.insert(name);
}

void PastGroups::skip(const std::string& name) { note_number(name); }

void PastGroups::remove(const std::string& name) {
  const auto numbered = parse(name);
  const bool implied = numbered && (present_.count(numbered->parent) != 0 || contains(numbered->parent));
  present_.erase(name);
  last_.erase(name);  // all groups made from it are past now
  if (!implied) named_.insert(name);
}

bool PastGroups::contains(const std::string& name) const {
  if (present_.count(name) != 0) return false;
  if (named_.count(name) != 0) return true;
  const auto numbered = parse(name);
  if (!numbered) return false;
  const auto it = last_.find(numbered->parent);
  if (it != last_.end() && numbered->number <= it->second) return true;
  return contains(numbered->parent);
}

}  // namespace maniple
