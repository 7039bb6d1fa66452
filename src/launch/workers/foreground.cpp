#include "launch/workers/foreground.h"

#include <sstream>
#include <string>

#include <fmt/format.h>

#include "base/files.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {

bool has_terminal(std::string_view stat_line) {
  const auto name_end = stat_line.rfind(')');
  if (name_end == std::string_view::npos) return true;
  std::istringstream fields{std::string(stat_line.substr(name_end + 1))};
  char state = 0;
  int parent = 0, group = 0, session = 0, terminal = 0, foreground = 0;
  if (!(fields >> state >> parent >> group >> session >> terminal >> foreground)) return true;
  return terminal == 0 || foreground == group;
}

bool in_foreground() { return has_terminal(file_text(fmt::format("/proc/{}/stat", supervisor_pid()))); }

}  // namespace maniple::launch
