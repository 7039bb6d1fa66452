// A command whose lines are read as they come; it does not outlive its owner.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include <maniple/comm/deadline.h>

namespace maniple::doctor {

class RemoteCommand {
 public:
  /// Throws SystemError when it cannot be started.
  explicit RemoteCommand(std::vector<std::string> words);
  ~RemoteCommand();
  RemoteCommand(const RemoteCommand&) = delete;
  RemoteCommand& operator=(const RemoteCommand&) = delete;

  /// The next line of its standard output; nullopt at the end of it or of the time.
  std::optional<std::string> next_line(Deadline deadline);
  /// The last line that it has written to standard error, after its output has ended.
  std::string complaint();
  /// There will be no more lines.
  bool has_ended() const noexcept { return ended_; }

 private:
  pid_t pid_ = -1;
  UniqueFd out_;
  UniqueFd err_;
  std::string buffer_;
  bool ended_ = false;
};

}  // namespace maniple::doctor
