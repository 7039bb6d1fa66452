// The checks of `maniple doctor`, and what a check says: a verdict, what was found, and how to fix it, in one line each.
//
// A new check has three things (the facts, a pure function that judges them, and one that gathers them on this machine) in
// the file of its matter, and one line in the table.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <vector>

namespace maniple::doctor {

enum class Verdict {
  ok,
  warn,  ///< works, but slowly, or not in every case
  fail,  ///< training will not work
};
const char* to_string(Verdict verdict) noexcept;  ///< "ok", "warn", "FAIL"

struct Finding {
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string fix = {};  ///< empty when there is nothing to fix
};
using Findings = std::vector<Finding>;

/// "1.5 GiB"
std::string size_text(double bytes);

struct Check {
  const char* name;
  Findings (*run)();
};
std::span<const Check> checks() noexcept;

/// An attempt whose failure is a finding, not an error: what goes wrong in it; empty: nothing.
template <class Attempt>
std::string problem_in(Attempt attempt) {
  try {
    attempt();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace maniple::doctor
