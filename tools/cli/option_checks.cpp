#include "tools/cli/option_checks.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::cli {
namespace {

std::map<std::string, std::string>& typed_names() {
  static std::map<std::string, std::string> names;  // by the first long name
  return names;
}

/// Converts the text as the parser does.
template <class T>
bool is_within(const std::string& text, T min, T max) {
  T value{};
  return CLI::detail::lexical_cast(text, value) && value >= min && value <= max;
}

}  // namespace

void remember_name(const CLI::Option& option, std::string_view typed) { typed_names()[option.get_name()] = typed; }

std::string as_typed(const std::string& name) {
  const auto found = typed_names().find(name);
  return found == typed_names().end() ? name : found->second;
}

void refuse(const CLI::Option& option, std::string_view value, std::string_view expected) {
  if (value.empty()) refuse_empty(option);
  throw InvalidArgument(fmt::format("{} is \"{}\"; expected {}", as_typed(option.get_name()), value, expected));
}

void refuse_empty(const CLI::Option& option) {
  throw InvalidArgument(
      fmt::format("{} is empty; expected a value, or the option left out (a shell variable that is not set?)",
                  as_typed(option.get_name())));
}

CLI::Option* takes(CLI::Option* option, std::string expected, std::function<bool(const std::string&)> accepts,
                   std::string description) {
  return option->check(CLI::Validator(
      [option, expected = std::move(expected), accepts = std::move(accepts)](std::string& text) -> std::string {
        if (!accepts(text)) refuse(*option, text, expected);
        return {};
      },
      std::move(description)));
}

CLI::Option* takes_whole_number(CLI::Option* option, std::int64_t min, std::int64_t max) {
  const bool open = max >= std::numeric_limits<int>::max();
  return takes(
      option,
      open ? fmt::format("a whole number, at least {}", min) : fmt::format("a whole number from {} to {}", min, max),
      [=](const std::string& text) { return is_within(text, min, max); });
}

CLI::Option* takes_number(CLI::Option* option, double min, double max) {
  return takes(option, fmt::format("a number, at least {}", min),
               [=](const std::string& text) { return is_within(text, min, max); });
}

CLI::Option* takes_seconds(CLI::Option* option, double min) {
  constexpr double kMax = 1e9;
  return takes(option, min > 0 ? fmt::format("a number of seconds, at least {}", min) : "a number of seconds",
               [=](const std::string& text) { return is_within(text, min, kMax); });
}

CLI::Option* takes_one_of(CLI::Option* option, const std::vector<const char*>& choices) {
  const std::vector<std::string> all(choices.begin(), choices.end());
  const std::vector<std::string> first(all.begin(), all.end() - 1);
  return takes(
      option, fmt::format("{} or {}", fmt::join(first, ", "), all.back()),
      [all](const std::string& text) { return std::find(all.begin(), all.end(), text) != all.end(); },
      fmt::format("{{{}}}", fmt::join(all, ",")));
}

}  // namespace maniple::cli
