// The end of a worker's output, for the report when it fails; and which ranks report a loss that others have reported.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

/// The last lines of both outputs of a worker together; and, of programs that do not report their failure
/// (worker_messages.h), the last that looks like an error. All of it is shown to people; nothing is decided by it.
class OutputTail {
 public:
  static constexpr std::size_t kLines = 10;
  static constexpr std::size_t kLineBytes = 400;

  /// Complete lines; only the last few are looked at closely. Errors are looked for in every line if `errors`.
  void take(std::string_view lines, bool errors);

  /// Without `error`, which is shown before them, without stack frames and empty lines.
  std::vector<std::string> lines(const std::string& error) const;
  const std::string& error() const noexcept { return error_; }
  /// The worker has reported its failure: its output is not searched.
  void stop_looking();

 private:
  void look_for_error(std::string_view line);

  std::deque<std::string> lines_;
  std::string before_;   // the line of errors before the present one
  std::string opening_;  // "what():  ...", the first line of an exception that ended the program
  std::string error_;
  int rating_ = 0;
  bool looks_ = true;
};

/// When a rank dies, all that wait for it report that, print it and end: one of them is shown, the others are counted. Pure.
class RepeatedLosses {
 public:
  /// Rank `by` has reported this error. True if it is the loss of a rank that another one has reported before.
  bool report(int by, const ErrorInfo& error);
  /// A rank whose last report was a repeated loss has failed: it is counted.
  void failed(int by);
  /// "maniple: ranks 0, 3 reported the same loss of rank 2", a line for each lost rank; empty if there is none. Each is
  /// summed up once.
  std::string summary();

 private:
  struct Loss {
    int first = -1;        // who reported it first
    std::set<int> others;  // that have reported it and failed
  };
  std::map<int, int> repeated_;  // by the rank that reports: whose loss
  std::map<int, Loss> losses_;   // by the rank that is lost
};

}  // namespace maniple::launch
