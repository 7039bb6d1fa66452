// Which algorithm runs: the rules in one place. (In shared memory the choice is made in shm/run.cpp, by size and memory.)
#pragma once

#include <string>
#include <string_view>

#include "collective/mesh/algorithms.h"

namespace maniple {

/// For ranks that exchange messages. `forced` is taken where the operation has an algorithm of that name.
const MeshEntry& choose_mesh_algorithm(const Operation& operation, int ranks, std::string_view forced) noexcept;

/// Throws InvalidArgument, listing the names there are, unless some operation has an algorithm of that name (or it is empty).
void require_algorithm(std::string_view name);

/// One line for each algorithm: operation, name, sentence.
std::string list_algorithms();

}  // namespace maniple
