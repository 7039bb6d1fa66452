// Which operations Gloo does by itself, and how.
#pragma once

#include <memory>

#include "backend/plugin/gloo/gloo_context.h"

namespace maniple::gloo_engine {

bool has_collective(const Operation& operation) noexcept;

/// `tag` differs from call to call. Throws GivenUp and what Gloo throws.
void run_collective(const std::shared_ptr<LimitedContext>& context, const Operation& operation, PairReduce reduce,
                    std::uint32_t tag);

}  // namespace maniple::gloo_engine
