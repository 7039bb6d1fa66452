// The process that started all ranks of this host: the nearest ancestor that is no part of the job itself.
#pragma once

#include <sys/types.h>

#include <string_view>

namespace maniple {

/// The nearest ancestor whose environment lacks `variable`, which the launcher gave its ranks (scripts between the two
/// have it, too). Also the parent, when environments cannot be read.
pid_t starter_process(std::string_view variable);

}  // namespace maniple
