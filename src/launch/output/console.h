// What the launcher shows: the lines of the workers, its own messages, and on a terminal one line of status below them.
//
// The status line is erased before anything else is printed and drawn again a moment later, so that a burst of lines
// costs no more than one line.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "comm/net/poller.h"
#include "launch/output/output_stream.h"

namespace maniple::launch {

enum class ColourChoice { automatic, always, never };

struct ConsoleOptions {
  bool quiet = false;  ///< no lines of workers, no status
  bool prefix = true;  ///< "[rank 3] "
  bool status = true;  ///< a status line, if standard error is a terminal
  ColourChoice colour = ColourChoice::automatic;
};

class Console {
 public:
  Console(Poller& poller, const ConsoleOptions& options);
  ~Console();

  OutputStream& out() noexcept { return out_; }
  OutputStream& err() noexcept { return err_; }

  /// "[rank 3] ", coloured if that stream shows colours; empty without prefixes.
  std::string prefix_for(int rank, bool to_err) const;

  /// To be called before anything is appended to a stream.
  void make_room();

  /// A message of the launcher itself: one or more lines on standard error, without the last line break.
  void say(std::string_view text);

  /// The text of the status line is asked for when it is drawn. Called at most four times a second.
  void set_status(std::function<std::string()> text);

  /// While it is paused (the job is in the background of a shell) no status is drawn.
  void pause(bool paused);
  /// Erases the status line for good.
  void finish();
  /// For an agent that learns them late. No worker may have been started yet.
  void set_options(const ConsoleOptions& options) { options_ = options; }
  /// Everything is written, or nobody reads it any more.
  bool drained() const noexcept { return out_.empty() && err_.empty(); }

 private:
  void draw();
  bool colours(const OutputStream& stream) const;

  Poller& poller_;
  ConsoleOptions options_;
  OutputStream out_;
  OutputStream err_;
  std::function<std::string()> status_;
  bool drawn_ = false;
  bool paused_ = false;
  Poller::Timer timer_ = 0;
};

}  // namespace maniple::launch
