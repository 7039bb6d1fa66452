// One output of one worker, copied to the launcher's own: cut into lines, each with a prefix, never two lines mixed;
// byte for byte into the rank's file; its end kept for the report. Lines can be held back until it is known whether to
// show them.
//
// A line of more than 64 KiB is shown in pieces of that size. A last line without a line break is shown when the worker
// has ended. The file gets what the worker wrote and nothing else.
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

/// The file of a rank. A disk that is full costs one warning; the job goes on.
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
  /// The worker has ended: shows what is left of its last line.
  void finish();

  void hold() { display_ = Display::held; }  ///< keeps lines back from now on; too many are shown all the same
  void drop();  ///< shows neither those that are held nor any that follow; unless they are more
                ///< than an error takes (two lines): then all of them are shown
  void show();  ///< shows those that are held, and all that follow

  bool congested() const noexcept { return route_.shown && stream().congested(); }

 private:
  OutputStream& stream() const noexcept { return route_.to_err ? console_.err() : console_.out(); }
  enum class Display { shown, held, dropped };
  void take_lines(std::string_view lines);
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
};

}  // namespace maniple::launch
