// The table of `maniple knobs`, for a terminal of any width. Pure: environment and width are arguments.
#pragma once

#include <cstddef>
#include <string>

#include "base/environment.h"

namespace maniple::cli {

/// Narrow terminals get the meaning below the values, wide ones beside them; `width` 0: every knob is one line, for grep.
/// What `read` finds set is shown behind the meaning.
std::string knobs_table(const ReadVariable& read, std::size_t width);

}  // namespace maniple::cli
