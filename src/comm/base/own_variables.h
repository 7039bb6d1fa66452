// Which MANIPLE_ variables there are besides the knobs, and what to say of one that nobody reads: a misspelt name would
// otherwise be ignored without a word.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

/// A variable by which one of our processes tells another something, or that others set for reasons of their own.
struct OwnVariable {
  const char* name;
  const char* meaning;
  bool for_users = false;  ///< may be proposed to one who misspelt a name
};
std::span<const OwnVariable> own_variables() noexcept;

/// Those names of an environment ("NAME=VALUE" each) that begin with MANIPLE_ and are neither knobs nor in the table
/// above, sorted; without those of which MANIPLE_WARNED says that somebody has spoken of them.
std::vector<std::string> unknown_variables(std::span<const std::string> environment);
/// Those of this process.
std::vector<std::string> unknown_variables();

/// How many letters must be added, removed or exchanged to make one of the other.
std::size_t edit_distance(std::string_view a, std::string_view b);
/// Names that are farther apart are not taken for misspellings of each other.
inline constexpr std::size_t kFarthest = 2;

/// The known name that is nearest; empty when all are farther than kFarthest.
std::string_view nearest_variable(std::string_view name);

/// A line about all of them, a sentence for each.
std::string describe_unknown(std::span<const std::string> names);

/// Warns of the unknown variables of this process, once.
void warn_of_unknown_variables();

/// Warns of those of another environment, and lets the processes that are started from here know that this was done.
void warn_of_unknown_variables_for_children(std::span<const std::string> environment);

}  // namespace maniple
