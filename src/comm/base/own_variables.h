// The MANIPLE_ variables that are not knobs, and the warning about unknown ones: a misspelt name would otherwise be
// silently ignored.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

/// A variable that Maniple's processes pass to each other, or that other software sets.
struct OwnVariable {
  const char* name;
  const char* meaning;
  bool for_users = false;  ///< may be suggested for a misspelt name
};
std::span<const OwnVariable> own_variables() noexcept;

/// The names in `environment` ("NAME=VALUE" entries) that begin with MANIPLE_ but are neither knobs nor own variables,
/// sorted. Names listed in MANIPLE_WARNED are omitted: a parent process has already warned of them.
std::vector<std::string> unknown_variables(std::span<const std::string> environment);
/// The unknown variables of this process.
std::vector<std::string> unknown_variables();

/// Edit distance: letters to add, remove or replace to turn one text into the other.
std::size_t edit_distance(std::string_view a, std::string_view b);
/// The largest edit distance at which one name counts as a misspelling of the other.
inline constexpr std::size_t kFarthest = 2;

/// The nearest known name; empty when all are farther than kFarthest.
std::string_view nearest_variable(std::string_view name);

/// One line that describes all names, one sentence each.
std::string describe_unknown(std::span<const std::string> names);

/// Warns of this process's unknown variables, once.
void warn_of_unknown_variables();

/// Warns of the unknown variables in `environment`, and adds them to MANIPLE_WARNED so that child processes do not warn
/// again.
void warn_of_unknown_variables_for_children(std::span<const std::string> environment);

}  // namespace maniple
