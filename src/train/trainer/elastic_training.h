// Why a rank of an elastic job leaves the training loop (elastic_training.cpp).
#pragma once

#include <string>

namespace maniple {

/// Thrown between two steps: the launcher has formed another generation.
struct MembersChange {};
/// Thrown between two steps: this process leaves, and the others go on.
struct Leaves {
  std::string why;
};

}  // namespace maniple
