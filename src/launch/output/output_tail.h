// The end of a worker's output, for the report when it fails; and which ranks report an error that others have
// reported.
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

  /// Without the line of `error`, which is shown before them, without stack frames and empty lines.
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

/// When a rank dies, all that wait for it report that, print it and end; when ranks call different things, all of them
/// do. One is shown, the others are counted. Pure.
class RepeatedErrors {
 public:
  /// Rank `by` has reported this error. True if it is a loss or a mismatch that another rank has reported before.
  bool report(int by, const ErrorInfo& error);
  /// A rank whose last report was a repeated one has failed: it is counted.
  void failed(int by);
  /// Rank `by` is shown elsewhere, with its error: it is not listed.
  void shown(int by);
  /// "maniple: ranks 0, 3 reported the same loss of rank 2", a line for each error; empty if there is none. Each is
  /// summed up once.
  std::string summary();

 private:
  struct Reported {
    int first = -1;        // who reported it first
    std::set<int> others;  // that have reported it and failed
  };
  std::map<int, std::string> repeated_;     // by the rank that reports: which one
  std::map<std::string, Reported> errors_;  // by what tells them apart, for people
};

}  // namespace maniple::launch
