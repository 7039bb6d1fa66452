#include "net/throttled_log.h"

#include "base/log.h"

namespace maniple {

void ThrottledLog::warn(std::string_view kind, const std::string& line) {
  const auto now = std::chrono::steady_clock::now();
  const auto found = last_.find(kind);
  if (found == last_.end()) {
    last_.emplace(std::string(kind), Last{now, 0});
    log_warning("{}", line);
    return;
  }
  Last& last = found->second;
  if (now - last.when < pause_) {
    ++last.left_out;
    return;
  }
  if (last.left_out == 0) {
    log_warning("{}", line);
  } else {
    log_warning("{} ({} more like it before)", line, last.left_out);
  }
  last = Last{now, 0};
}

}  // namespace maniple
