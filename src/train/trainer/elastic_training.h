// Why a rank of an elastic job leaves the training loop (elastic_training.cpp).
#pragma once

namespace maniple {

/// Thrown between two steps: the launcher has formed another generation.
struct MembersChange {};
/// Thrown after a step: this process got a signal, and leaves while the others go on.
struct Leaves {};

}  // namespace maniple
