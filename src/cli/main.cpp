#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "cli/command.h"
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

/// `--hosts "$HOSTS"` where the variable is not set is a mistake, not the absence of the option.
void refuse_empty_values(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& value : option->results()) {
      MANIPLE_REQUIRE(!value.empty(),
                      "{} is empty; expected a value, or the option left out (a shell variable that is not set?)",
                      option->get_name());
    }
  }
}

/// mpirun's -np means -n; the parser would read it as -n with the value "p". And `--` ends the options of `maniple run`: the parser would
/// give what follows it to no command. What follows the program is left as it is.
void prepare(const CLI::App& command, std::vector<const char*>& arguments) {
  if (command.get_option_no_throw("-n") == nullptr) return;
  for (std::size_t i = 2; i < arguments.size() && arguments[i][0] == '-'; ++i) {
    const std::string_view word = arguments[i];
    if (word == "--") {
      arguments[i] = kEndOfOptions;
      return;
    }
    if (word == "-np" || word == "--np") arguments[i] = "-n";
    const CLI::Option* option = command.get_option_no_throw(arguments[i]);
    if (option == nullptr || option->get_items_expected_max() == 0) continue;
    MANIPLE_REQUIRE(i + 1 < arguments.size(), "{} needs a value: {} {}, then the program", word, word,
                    option->get_type_name());
    ++i;  // its value
  }
}

int run(int argc, char** argv) {
  CLI::App app("Maniple: distributed deep-learning training in C++.", "maniple");
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", fmt::format("maniple {}", maniple::version()));
  std::function<int()> chosen;
  // Only the command that is meant: declaring all of them would cost `maniple run` a good part of its start.
  const Command* meant = argc > 1 ? find_command(argv[1]) : nullptr;
  for (const Command& command : commands()) {
    if (meant != nullptr && meant != &command) continue;
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    if (*command.summary == '\0') sub->group("");
    sub->parse_complete_callback([&chosen, action = command.declare(*sub)] { chosen = action; });
  }
  app.footer("`maniple COMMAND --help` explains a command.");  // after the commands, which would inherit it
  if (argc > 1 && argv[1][0] != '-' && find_command(argv[1]) == nullptr) return refuse_unknown(argv[1]);
  try {
    std::vector<const char*> arguments(argv, argv + argc);
    if (meant != nullptr) prepare(*app.get_subcommand(meant->name), arguments);
    app.parse(argc, arguments.data());
  } catch (const CLI::Success& asked) {  // for help or the version
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
