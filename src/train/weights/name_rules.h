// Renaming by regular expressions, as sed -E and Python's re.sub do it. Without LibTorch.
//
// They are POSIX extended expressions, those of regcomp, not std::regex: LibTorch's libraries may bring symbols of an
// older copy of that, and it recurses once for each character. \d for a digit is understood, too.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace maniple {

class NameRules {
 public:
  /// Pairs of expression and replacement, in which \1 to \9 are what was matched in parentheses, and \0 all of it.
  /// Throws InvalidArgument for an expression that cannot be understood, with what the C library says of it.
  explicit NameRules(const std::vector<std::pair<std::string, std::string>>& rules);
  /// Expressions that only match.
  explicit NameRules(const std::vector<std::string>& patterns);
  ~NameRules();
  NameRules(const NameRules&) = delete;
  NameRules& operator=(const NameRules&) = delete;

  /// Every rule is applied, in order, to what the one before it left, wherever it matches.
  std::string apply(std::string name) const;
  /// Whether one of them matches somewhere in the name.
  bool matches(const std::string& name) const;

 private:
  struct Rule;
  std::vector<std::unique_ptr<Rule>> rules_;
};

}  // namespace maniple
