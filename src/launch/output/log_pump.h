// Copies one output of one worker to three places: to the launcher's output, as whole lines with a prefix; to the
// rank's file, byte for byte; and to the OutputTail for the failure report. Lines can be held back until it is known
// whether to show them.
//
// A line of more than 64 KiB is shown in pieces of 64 KiB. A last line without a line break is shown when the worker
// has ended.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/base/unique_fd.h"
#include "launch/output/console.h"
#include "launch/output/output_tail.h"

namespace maniple::launch {

/// A rank's log file. A write error, such as a full disk, warns once and ends the file; the job continues.
class LogFile {
 public:
  LogFile(const std::string& path, bool append, std::function<void(std::string)> warn);
  void write(std::string_view bytes);

 private:
  std::string path_;
  UniqueFd file_;
  std::function<void(std::string)> warn_;
};

class LogPump {
 public:
  struct Route {
    bool to_err = false;
    bool shown = true;
    std::string prefix;
  };
  LogPump(Console& console, Route route, std::shared_ptr<OutputTail> tail, std::shared_ptr<LogFile> file);

  /// Bytes as they came from the worker.
  void take(std::string_view bytes);
  /// The worker has ended: shows the rest of its last line.
  void finish();

  void hold() { display_ = Display::held; }  ///< holds lines back from now on, up to kMostHeld bytes
  /// Shows the held lines and all that follow, except the lines that contain the first line of `error`.
  void drop_repeats(std::string_view error);
  void drop();  ///< discards the held lines and all that follow; but shows them all if more
                ///< than two lines are held, which is more than an error takes
  void show();  ///< shows the held lines and all that follow

  bool congested() const noexcept { return route_.shown && stream().congested(); }

 private:
  OutputStream& stream() const noexcept { return route_.to_err ? console_.err() : console_.out(); }
  enum class Display { shown, held, filtered, dropped };
  void take_lines(std::string_view lines);
  void show_other_lines(std::string_view lines);
  void show_lines(std::string_view lines);

  static constexpr std::size_t kLongestLine = std::size_t{64} << 10;
  static constexpr std::size_t kMostHeld = std::size_t{64} << 10;

  Console& console_;
  Route route_;
  std::shared_ptr<OutputTail> tail_;
  std::shared_ptr<LogFile> file_;
  std::string partial_;
  Display display_ = Display::shown;
  std::string held_;
  std::string repeated_;  // while filtered: lines that contain it are discarded
};

}  // namespace maniple::launch
