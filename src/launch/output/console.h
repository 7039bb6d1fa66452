// The launcher's display: worker output, the launcher's own messages, and on a terminal one status line below them.
//
// The status line is erased before anything else is printed and redrawn a moment later, so a burst of lines redraws it
// only once.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "comm/net/poller.h"
#include "launch/output/output_stream.h"

namespace maniple::launch {

enum class ColourChoice { automatic, always, never };

struct ConsoleOptions {
  bool quiet = false;  ///< no worker output, no status
  bool prefix = true;  ///< "[rank 3] "
  bool status = true;  ///< a status line, if standard error is a terminal
  ColourChoice colour = ColourChoice::automatic;
  friend bool operator==(const ConsoleOptions&, const ConsoleOptions&) = default;
};

class Console {
 public:
  Console(Poller& poller, const ConsoleOptions& options);
  ~Console();

  OutputStream& out() noexcept { return out_; }
  OutputStream& err() noexcept { return err_; }

  /// "[rank 3] ", coloured if the stream shows colours; empty if prefixes are off.
  std::string prefix_for(int rank, bool to_err) const;

  /// Call before appending to a stream: erases the status line.
  void make_room();

  /// Prints a message of the launcher to standard error: one or more lines, without the last line break.
  void say(std::string_view text);

  /// `text` is called whenever the status line is drawn, at most four times a second.
  void set_status(std::function<std::string()> text);

  /// No status is drawn while paused, when the job is in a shell's background.
  void pause(bool paused);
  /// Erases the status line for good.
  void finish();
  /// For an agent that receives its options after it has started. Call before any worker is started.
  void set_options(const ConsoleOptions& options) { options_ = options; }
  /// Everything is written, or the readers are gone.
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
