// A backend whose bytes travel by another engine: every operation, errors and messages as with "native".
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/carrier.h"

namespace maniple {

/// Makes the carrier of a group. Throws what setting up can throw.
std::unique_ptr<Backend> make_carried_backend(const BackendContext& context, const CarrierPlugin& plugin);

}  // namespace maniple
