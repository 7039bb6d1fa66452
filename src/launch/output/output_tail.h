// The end of a worker's output for the failure report, and the detection of errors that several ranks report.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

/// The last lines of a worker's two outputs together. For programs that do not report their failure
/// (worker_messages.h), also the last line that looks like an error. Shown to people; no decision depends on it.
class OutputTail {
 public:
  static constexpr std::size_t kLines = 10;
  static constexpr std::size_t kLineBytes = 400;

  /// Takes complete lines and keeps the last few. With `errors` every line is searched for errors.
  void take(std::string_view lines, bool errors);

  /// Omits the line of `error`, which is shown before them, as well as stack frames and empty lines.
  std::vector<std::string> lines(const std::string& error) const;
  const std::string& error() const noexcept { return error_; }
  /// The worker has reported its failure, so its output need not be searched for errors.
  void stop_looking();

 private:
  void look_for_error(std::string_view line);

  std::deque<std::string> lines_;
  std::string before_;   // the error line before the current one
  std::string opening_;  // "what():  ...", the first line of an exception that ended the program
  std::string error_;
  int rating_ = 0;
  bool looks_ = true;
};

/// Counts repeated errors. When a rank dies, all ranks that wait for it report the loss, print it and end; when ranks
/// call different operations, all of them report the mismatch. One report is shown, the others are counted. Pure.
class RepeatedErrors {
 public:
  /// Rank `by` has reported `error`. True if it is a loss or a mismatch that another rank has already reported.
  bool report(int by, const ErrorInfo& error);
  /// Rank `by` has failed: it is counted if its last report was a repeated one.
  void failed(int by);
  /// Rank `by` is shown elsewhere with its error, so no summary lists it, also if it fails later.
  void shown(int by);
  /// "maniple: ranks 0, 3 reported the same loss of rank 2", one line per error; empty if there is none. Each error is
  /// summarised once.
  std::string summary();

 private:
  struct Reported {
    int first = -1;        // the rank that reported it first
    std::set<int> others;  // ranks that have reported it and failed
  };
  std::set<int> shown_;
  std::map<int, std::string> repeated_;     // by reporting rank: the key in errors_
  std::map<std::string, Reported> errors_;  // by a readable text that identifies the error
};

}  // namespace maniple::launch
