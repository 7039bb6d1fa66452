// What a check says: a verdict, what was found, and how to mend it. One line each.
#pragma once

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
  std::string mend = {};  ///< empty when there is nothing to mend
};
using Findings = std::vector<Finding>;

/// "1.5 GiB"
std::string size_text(double bytes);

}  // namespace maniple::doctor
