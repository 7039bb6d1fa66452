// A new stream socket, close-on-exec and non-blocking.
#pragma once

#include <string>

#include "base/unique_fd.h"

namespace maniple {

/// When descriptors run out the soft limit is raised once; if that does not help, SystemError says `purpose`, how many
/// there are and how many are allowed.
UniqueFd open_stream_socket(int family, const std::string& purpose);

}  // namespace maniple
