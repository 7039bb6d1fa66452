// Checks option values. Wrong values are refused in one form, with the option's name as it was typed:
//
//   maniple: --grace is "x"; expected a number of seconds
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class Option;
}

namespace maniple::cli {

/// From now on messages use the name `typed` for the option, which may have several names.
void remember_name(const CLI::Option& option, std::string_view typed);
/// The name that was typed for the option whose first long name is `name`; `name` itself if none was remembered.
std::string as_typed(const std::string& name);

/// Throws InvalidArgument.
[[noreturn]] void refuse(const CLI::Option& option, std::string_view value, std::string_view expected);
[[noreturn]] void refuse_empty(const CLI::Option& option);

// Each function makes the parser refuse other values, and returns the option. `description` is shown by --help after
// the value's type.
CLI::Option* takes(CLI::Option* option, std::string expected, std::function<bool(const std::string&)> accepts,
                   std::string description = {});
CLI::Option* takes_whole_number(CLI::Option* option, std::int64_t min,
                                std::int64_t max = std::numeric_limits<int>::max());
CLI::Option* takes_number(CLI::Option* option, double min, double max = std::numeric_limits<double>::infinity());
CLI::Option* takes_seconds(CLI::Option* option, double min = 0);
CLI::Option* takes_one_of(CLI::Option* option, const std::vector<const char*>& choices);

}  // namespace maniple::cli
