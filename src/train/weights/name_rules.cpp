#include "train/weights/name_rules.h"

#include <regex.h>

#include <array>
#include <cctype>

#include "comm/base/check.h"

namespace maniple {
namespace {

constexpr std::size_t kMaxRenamedBytes = 4096;

/// Replaces \d by its POSIX form, inside and outside brackets.
std::string without_digit_class(const std::string& pattern) {
  std::string result;
  bool inside = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 'd')
        result += inside ? "0-9" : "[0-9]";
      else
        (result += '\\') += next;
      continue;
    }
    if (pattern[i] == '[') inside = true;
    if (pattern[i] == ']') inside = false;
    result += pattern[i];
  }
  return result;
}

}  // namespace

struct NameRules::Rule {
  Rule(const std::string& pattern, std::string text) : replacement(std::move(text)) {
    const int code = ::regcomp(&compiled, without_digit_class(pattern).c_str(), REG_EXTENDED);
    if (code == 0) return;
    std::array<char, 200> reason{};
    ::regerror(code, &compiled, reason.data(), reason.size());
    throw InvalidArgument(
        format_text("\"{}\" is not a regular expression (POSIX, extended): {}", pattern, reason.data()));
  }
  ~Rule() { ::regfree(&compiled); }
  Rule(const Rule&) = delete;
  Rule& operator=(const Rule&) = delete;

  std::string apply(const std::string& name) const {
    std::string result;
    std::size_t at = 0;
    std::array<regmatch_t, 10> found{};
    while (at <= name.size() &&
           ::regexec(&compiled, name.c_str() + at, found.size(), found.data(), at == 0 ? 0 : REG_NOTBOL) == 0) {
      const std::size_t begin = at + found[0].rm_so, end = at + found[0].rm_eo;
      result.append(name, at, begin - at);
      for (std::size_t i = 0; i < replacement.size(); ++i) {
        const bool group = replacement[i] == '\\' && i + 1 < replacement.size() &&
                           std::isdigit(static_cast<unsigned char>(replacement[i + 1])) != 0;
        if (!group) {
          result += replacement[i];
          continue;
        }
        const regmatch_t& part = found.at(replacement[++i] - '0');
        if (part.rm_so >= 0) result.append(name, at + part.rm_so, part.rm_eo - part.rm_so);
      }
      at = end;
      if (begin == end) {  // an empty match: continue after the next character
        if (at < name.size()) result += name[at];
        ++at;
      }
      MANIPLE_REQUIRE(result.size() <= kMaxRenamedBytes, "renaming makes a name of more than {} bytes of \"{}\"",
                      kMaxRenamedBytes, name);
    }
    if (at < name.size()) result.append(name, at, std::string::npos);
    return result;
  }

  ::regex_t compiled{};
  std::string replacement;
};

NameRules::NameRules(const std::vector<std::pair<std::string, std::string>>& rules) {
  for (const auto& [pattern, replacement] : rules) rules_.push_back(std::make_unique<Rule>(pattern, replacement));
}

NameRules::NameRules(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) rules_.push_back(std::make_unique<Rule>(pattern, ""));
}

NameRules::~NameRules() = default;

std::string NameRules::apply(std::string name) const {
  for (const auto& rule : rules_) name = rule->apply(name);
  return name;
}

bool NameRules::matches(const std::string& name) const {
  for (const auto& rule : rules_) {
    if (::regexec(&rule->compiled, name.c_str(), 0, nullptr, 0) == 0) return true;
  }
  return false;
}

}  // namespace maniple
