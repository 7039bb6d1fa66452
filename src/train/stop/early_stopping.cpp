#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "base/check.h"
#include <maniple/dist.h>
#include <maniple/train/stop.h>

namespace maniple {

EarlyStopping::EarlyStopping(EarlyStoppingOptions options)
    : options_(std::move(options)), best_(std::numeric_limits<double>::quiet_NaN()) {
  MANIPLE_REQUIRE(options_.patience >= 1, "EarlyStopping: a patience of {}; expected at least 1", options_.patience);
  MANIPLE_REQUIRE(options_.min_delta >= 0 && std::isfinite(options_.min_delta),
                  "EarlyStopping: a min_delta of {}; expected a number that is not negative", options_.min_delta);
  if (options_.group) options_.group->require_member("EarlyStopping");
}

bool EarlyStopping::update(double value) {
  if (should_stop()) return true;
  const auto group = options_.group ? options_.group : is_initialized() ? get_default_group() : nullptr;
  if (group && group->size() > 1) group->broadcast(buffer_of(value), 0);
  ++updates_;
  const double gain = options_.mode == StopMode::min ? best_ - value : value - best_;
  // Two infinities of the same sign differ by NaN, which is no gain.
  if (!std::isnan(value) && (std::isnan(best_) || gain > options_.min_delta)) {
    best_ = value;
    best_update_ = updates_;
    waited_ = 0;
  } else {
    ++waited_;
  }
  return should_stop();
}

std::string EarlyStopping::state() const {
  return format_text("best {:.17g} updates {} best_update {} waited {}", best_, updates_, best_update_, waited_);
}

void EarlyStopping::load_state(const std::string& text) {
  double best = 0;
  long long updates = 0, best_update = 0;
  int waited = 0, read = -1;
  const int fields = std::sscanf(text.c_str(), "best %lf updates %lld best_update %lld waited %d%n", &best, &updates,
                                 &best_update, &waited, &read);
  MANIPLE_REQUIRE(fields == 4 && read == static_cast<int>(text.size()) && best_update >= 0 && best_update <= updates &&
                      waited >= 0 && waited <= updates,
                  "EarlyStopping: \"{}\" is not what state() returns", text);
  best_ = best;
  updates_ = updates;
  best_update_ = best_update;
  waited_ = waited;
}

}  // namespace maniple
