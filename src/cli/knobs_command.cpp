#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/environment.h"
#include "cli/command.h"

namespace maniple::cli {
namespace {

int print_knobs() {
  std::size_t name_width = 0, value_width = 0;
  for (const KnobInfo& knob : knobs()) {
    name_width = std::max(name_width, std::strlen(knob.name));
    value_width = std::max(value_width, std::strlen(knob.default_text));
  }
  value_width = std::max(value_width, std::strlen("default"));
  fmt::print("{:<{}}  {:<{}}  meaning\n", "variable", name_width, "default", value_width);
  for (const KnobInfo& knob : knobs()) {
    const auto set = environment_text(knob.name);
    fmt::print("{:<{}}  {:<{}}  {}{}\n", knob.name, name_width, *knob.default_text == '\0' ? "-" : knob.default_text,
               value_width, knob.meaning, set ? fmt::format(" [now {}]", *set) : "");
  }
  return 0;
}

}  // namespace

std::function<int()> declare_knobs(CLI::App&) { return print_knobs; }

}  // namespace maniple::cli
