// Renaming by regular expressions, like sed -E and Python's re.sub. Without LibTorch.
//
// The expressions are POSIX extended expressions (regcomp), plus \d for a digit. std::regex is not used: LibTorch's
// libraries may bring symbols of an older copy of it, and it recurses once per character.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace maniple {

class NameRules {
 public:
  /// Pairs of expression and replacement. In the replacement, \1 to \9 are the parenthesised matches and \0 is the
  /// whole match. Throws InvalidArgument for an invalid expression, with the C library's error text.
  explicit NameRules(const std::vector<std::pair<std::string, std::string>>& rules);
  /// Expressions for matching only.
  explicit NameRules(const std::vector<std::string>& patterns);
  ~NameRules();
  NameRules(const NameRules&) = delete;
  NameRules& operator=(const NameRules&) = delete;

  /// Applies every rule in order, each to the result of the previous one, wherever it matches.
  std::string apply(std::string name) const;
  /// Whether any expression matches somewhere in the name.
  bool matches(const std::string& name) const;

 private:
  struct Rule;
  std::vector<std::unique_ptr<Rule>> rules_;
};

}  // namespace maniple
