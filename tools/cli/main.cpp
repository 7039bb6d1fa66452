#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <vector>

#include "comm/base/check.h"
#include "tools/cli/command.h"
#include "tools/cli/option_checks.h"
#include <maniple/comm/error.h>
#include <maniple/version.h>

namespace {

using namespace maniple::cli;

const Command* find_command(std::string_view name) {
  const auto all = commands();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Command& command) { return name == command.name; });
  return found == all.end() ? nullptr : &*found;
}

int refuse_unknown(std::string_view name) {
  std::string known;
  for (const Command& command : commands()) {
    if (*command.summary != '\0') known += fmt::format("{}{}", known.empty() ? "" : ", ", command.name);
  }
  fmt::print(stderr, "maniple: no command \"{}\"; there are {} (see maniple --help)\n", name, known);
  return kUsage;
}

/// Refuses empty values: `--hosts "$HOSTS"` with an unset variable is a mistake, not a missing option.
void refuse_empty_values(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& value : option->results()) {
      if (value.empty()) refuse_empty(*option);
    }
  }
}

/// The option's name without the value: "--ranks" of "--ranks=2", "-n" of "-n2".
std::string_view name_in(std::string_view word) { return word.substr(0, word.starts_with("--") ? word.find('=') : 2); }

/// The option that a word of the command line names; null if it names none.
const CLI::Option* find_option(const CLI::App& command, std::string_view word) {
  if (!word.starts_with('-')) return nullptr;
  const std::string name(name_in(word));
  if (const CLI::Option* option = command.get_option_no_throw(name)) return option;
  for (const CLI::App* sub : command.get_subcommands(std::function<bool(const CLI::App*)>())) {
    if (const CLI::Option* option = sub->get_option_no_throw(name)) return option;
  }
  return nullptr;
}

/// Remembers how options were typed, and refuses options whose value is missing. Replaces mpirun's -np by -n, because
/// the parser would read it as -n with the value "p". Also replaces the `--` that ends the options of `maniple run`,
/// because the parser would not pass the words after it to the command. Words after the program stay unchanged.
void prepare(const CLI::App& command, std::vector<const char*>& arguments) {
  const bool starts_program = command.get_option_no_throw("-n") != nullptr;
  for (std::size_t i = 2; i < arguments.size(); ++i) {
    const std::string_view word = arguments[i];
    if (starts_program && !word.starts_with('-')) return;
    if (starts_program && word == "--") {
      arguments[i] = kEndOfOptions;
      return;
    }
    const bool is_np = starts_program && (word == "-np" || word == "--np");
    if (is_np) arguments[i] = "-n";
    const CLI::Option* option = find_option(command, arguments[i]);
    if (option == nullptr || option->get_items_expected_max() == 0) continue;
    const std::string_view name = is_np ? word : name_in(word);
    remember_name(*option, name);
    if (name.size() < word.size()) continue;  // the word contains the value
    MANIPLE_REQUIRE(i + 1 < arguments.size() && find_option(command, arguments[i + 1]) == nullptr,
                    "{} needs a value: {} {}{}", name, name, option->get_type_name(),
                    starts_program ? ", then the program" : "");
    ++i;  // its value
  }
}

int run(int argc, char** argv) {
  CLI::App app("Maniple: distributed deep-learning training in C++.", "maniple");
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", fmt::format("maniple {}", maniple::version()));
  std::function<int()> chosen;
  // Declare only the requested command: declaring all would noticeably slow down the start of `maniple run`.
  const Command* meant = argc > 1 ? find_command(argv[1]) : nullptr;
  for (const Command& command : commands()) {
    if (meant != nullptr && meant != &command) continue;
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    if (*command.summary == '\0') sub->group("");
    sub->parse_complete_callback([&chosen, action = command.declare(*sub)] { chosen = action; });
  }
  app.footer("`maniple COMMAND --help` explains a command.");  // set last, or the commands would inherit it
  if (argc > 1 && argv[1][0] != '-' && find_command(argv[1]) == nullptr) return refuse_unknown(argv[1]);
  try {
    std::vector<const char*> arguments(argv, argv + argc);
    if (meant != nullptr) prepare(*app.get_subcommand(meant->name), arguments);
    app.parse(argc, arguments.data());
  } catch (const CLI::Success& asked) {  // help or version was requested
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "maniple: {} (see maniple {}--help)\n", error.what(),
               argc > 1 ? std::string(argv[1]) + " " : "");
    return kUsage;
  }
  for (const CLI::App* command : app.get_subcommands()) refuse_empty_values(*command);
  if (!chosen) {
    fmt::print("{}", app.help());
    return 0;
  }
  return chosen();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const maniple::InvalidArgument& error) {
    fmt::print(stderr, "maniple: {}\n", error.what());
    return kUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "maniple: {}\n", error.what());
    return kFailed;
  }
}
