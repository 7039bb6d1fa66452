// The end of a worker's output, for the report when it fails; and which of its lines of errors need not be shown.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

/// The last lines of both outputs of a worker together, and the last that looks like an error: for programs that do not
/// report their failure (worker_messages.h).
class OutputTail {
 public:
  static constexpr std::size_t kLines = 10;
  static constexpr std::size_t kLineBytes = 400;

  /// Complete lines; only the last few are looked at closely. Errors are looked for in every line if `errors`.
  void take(std::string_view lines, bool errors);

  /// Without `error`, which is shown before them, without stack frames and empty lines.
  std::vector<std::string> lines(const std::string& error) const;
  const std::string& error() const noexcept { return error_; }

 private:
  void look_for_error(std::string_view line);

  std::deque<std::string> lines_;
  std::string before_;   // the line of errors before the present one
  std::string opening_;  // "what():  ...", the first line of an exception that ended the program
  std::string error_;
  int rating_ = 0;
};

/// When a rank dies, all that wait for it report that, and print it: the first line is shown, the others are counted. Pure.
class RepeatedLosses {
 public:
  /// Rank `by` has reported this error.
  void report(int by, const ErrorInfo& error);
  /// Whether a line of errors of rank `by` repeats its report of a loss that another rank has reported before.
  bool is_repeated(int by, std::string_view line);
  /// "maniple: ranks 0, 3 reported the same loss of rank 2", a line for each lost rank; empty if there is none. Each is
  /// summed up once.
  std::string summary();

 private:
  struct Report {
    int lost = -1;
    std::string text;
  };
  struct Loss {
    int first = -1;  // who reported it first
    std::set<int> others;
  };
  std::map<int, Report> reports_;  // by the rank that reports
  std::map<int, Loss> losses_;     // by the rank that is lost
};

}  // namespace maniple::launch
