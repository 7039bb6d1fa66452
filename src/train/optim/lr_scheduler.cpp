#include <maniple/train/lr_scheduler.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>

#include "comm/base/check.h"
#include "train/checkpoint/named_state.h"
#include <maniple/train/optim.h>

namespace maniple {
namespace {

double half_cosine(double from, double to, double part) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

/// Sets the momentum of a group's options, under whatever name the options have for it.
void set_momentum(torch::optim::OptimizerOptions& options, double momentum) {
  if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) {
    sgd->momentum(momentum);
  } else if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) {
    std::get<0>(adam->betas()) = momentum;
  } else if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options)) {
    std::get<0>(adamw->betas()) = momentum;
  } else if (auto* lion = dynamic_cast<optim::LionOptions*>(&options)) {
    std::get<0>(lion->betas()) = momentum;
  } else if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) {
    rmsprop->momentum(momentum);
  } else {
    throw InvalidArgument(
        "LrScheduler: the schedule changes momentum, but this optimizer has none (.cycle_momentum = false leaves it "
        "alone)");
  }
}

/// Splits a saved state into words. Throws ProtocolError.
std::vector<std::string> words_of(const std::string& saved, const char* kind, std::size_t least) {
  std::istringstream stream(saved);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  if (words.size() < least || words.front() != kind)
    throw ProtocolError(format_text("\"{}\" is not the saved state of a {}", saved, kind));
  return words;
}

constexpr const char* kScheduler = "LrScheduler";
constexpr const char* kPlateau = "PlateauScheduler";

}  // namespace

namespace lr {

LrSchedule lambda(std::function<double(std::int64_t step)> factor) {
  MANIPLE_REQUIRE(factor != nullptr, "lr::lambda: no function was given");
  return {[factor = std::move(factor)](std::int64_t step, double base) { return base * factor(step); }};
}

LrSchedule linear(LinearOptions o) {
  MANIPLE_REQUIRE(o.start_factor > 0 && o.start_factor <= 1 && o.end_factor >= 0 && o.end_factor <= 1,
                  "lr::linear: from a factor of {} to {}; expected factors above 0 and up to 1", o.start_factor,
                  o.end_factor);
  MANIPLE_REQUIRE(o.steps >= 1, "lr::linear: in {} steps; expected at least 1", o.steps);
  return lambda([o](std::int64_t step) {
    const double part = static_cast<double>(std::min(step, o.steps)) / static_cast<double>(o.steps);
    return o.start_factor + (o.end_factor - o.start_factor) * part;
  });
}

LrSchedule constant(double factor, std::int64_t steps) {
  MANIPLE_REQUIRE(factor >= 0 && factor <= 1, "lr::constant: a factor of {}; expected one from 0 to 1", factor);
  return lambda([factor, steps](std::int64_t step) { return step < steps ? factor : 1.0; });
}

LrSchedule cosine(CosineOptions o) {
  MANIPLE_REQUIRE(o.steps >= 1, "lr::cosine: in {} steps; expected at least 1", o.steps);
  return {[o](std::int64_t step, double base) {
    return half_cosine(base, o.minimum, static_cast<double>(step) / static_cast<double>(o.steps));
  }};
}

LrSchedule cosine_restarts(CosineRestartsOptions o) {
  MANIPLE_REQUIRE(o.steps >= 1 && o.growth >= 1,
                  "lr::cosine_restarts: a first period of {} steps, each {} times as long as the one before; expected "
                  "at least 1",
                  o.steps, o.growth);
  return {[o](std::int64_t step, double base) {
    std::int64_t period = o.steps;
    if (o.growth == 1) {
      step %= period;
    } else {
      for (; step >= period; period *= o.growth) step -= period;
    }
    return half_cosine(base, o.minimum, static_cast<double>(step) / static_cast<double>(period));
  }};
}

LrSchedule one_cycle(OneCycleOptions o) {
  MANIPLE_REQUIRE(o.max_lr > 0, "lr::one_cycle: a max_lr of {}; expected a number above 0", o.max_lr);
  MANIPLE_REQUIRE(o.steps >= 1, "lr::one_cycle: in {} steps; expected at least 1", o.steps);
  MANIPLE_REQUIRE(o.rise >= 0 && o.rise <= 1, "lr::one_cycle: a rise of {}; expected a part from 0 to 1", o.rise);
  MANIPLE_REQUIRE(o.divide_start > 0 && o.divide_end > 0,
                  "lr::one_cycle: divided by {} and {}; expected numbers above 0", o.divide_start, o.divide_end);
  // A phase changes rate and momentum from its own values to the next phase's, which they reach at `end`. The last
  // phase has the final values.
  struct Phase {
    double end, rate, momentum;
  };
  const double total = static_cast<double>(o.steps), first = o.max_lr / o.divide_start, last = first / o.divide_end;
  std::vector<Phase> phases = {{o.rise * total - 1, first, o.max_momentum}};
  if (o.three_phases) {
    phases.push_back({2 * o.rise * total - 2, o.max_lr, o.base_momentum});
    phases.push_back({total - 1, first, o.max_momentum});
  } else {
    phases.push_back({total - 1, o.max_lr, o.base_momentum});
  }
  phases.push_back({total - 1, last, o.max_momentum});
  const auto at = [phases, anneal = o.anneal](std::int64_t step, double Phase::* value) {
    double begin = 0;
    std::size_t i = 0;
    for (; i + 2 < phases.size() && static_cast<double>(step) > phases[i].end; ++i) begin = phases[i].end;
    const double length = phases[i].end - begin;
    const double part = length > 0 ? std::clamp((static_cast<double>(step) - begin) / length, 0.0, 1.0) : 1;
    const double from = phases[i].*value, to = phases[i + 1].*value;
    return anneal == Anneal::cosine ? half_cosine(from, to, part) : from + (to - from) * part;
  };
  LrSchedule schedule{[at](std::int64_t step, double) { return at(step, &Phase::rate); }};
  if (o.cycle_momentum) schedule.momentum = [at](std::int64_t step) { return at(step, &Phase::momentum); };
  return schedule;
}

LrSchedule step(std::int64_t size, double gamma) {
  MANIPLE_REQUIRE(size >= 1, "lr::step: a size of {} steps; expected at least 1", size);
  return lambda([size, gamma](std::int64_t at) { return std::pow(gamma, static_cast<double>(at / size)); });
}

LrSchedule multi_step(std::vector<std::int64_t> milestones, double gamma) {
  MANIPLE_REQUIRE(std::is_sorted(milestones.begin(), milestones.end()),
                  "lr::multi_step: milestones [{}]; expected ascending ones", joined(milestones));
  return lambda([milestones = std::move(milestones), gamma](std::int64_t at) {
    const auto passed = std::upper_bound(milestones.begin(), milestones.end(), at) - milestones.begin();
    return std::pow(gamma, static_cast<double>(passed));
  });
}

LrSchedule exponential(double gamma) {
  return lambda([gamma](std::int64_t at) { return std::pow(gamma, static_cast<double>(at)); });
}

LrSchedule polynomial(std::int64_t steps, double power) {
  MANIPLE_REQUIRE(steps >= 1, "lr::polynomial: in {} steps; expected at least 1", steps);
  return lambda([steps, power](std::int64_t at) {
    return std::pow(1 - static_cast<double>(std::min(at, steps)) / static_cast<double>(steps), power);
  });
}

LrSchedule sequential(std::vector<LrSchedule> schedules, std::vector<std::int64_t> milestones) {
  MANIPLE_REQUIRE(!schedules.empty() && milestones.size() + 1 == schedules.size(),
                  "lr::sequential: {} schedules and {} milestones; expected one milestone less than schedules",
                  schedules.size(), milestones.size());
  MANIPLE_REQUIRE(std::is_sorted(milestones.begin(), milestones.end()),
                  "lr::sequential: milestones [{}]; expected ascending ones", joined(milestones));
  const bool momentum =
      std::any_of(schedules.begin(), schedules.end(), [](const LrSchedule& one) { return one.momentum != nullptr; });
  MANIPLE_REQUIRE(!momentum || std::all_of(schedules.begin(), schedules.end(),
                                           [](const LrSchedule& one) { return one.momentum != nullptr; }),
                  "lr::sequential: some schedules change momentum and others do not; expected all or none "
                  "(.cycle_momentum = false)");
  /// The index of the schedule at a step, and the step within it.
  const auto find = [milestones](std::int64_t at) {
    const auto passed = std::upper_bound(milestones.begin(), milestones.end(), at) - milestones.begin();
    const std::size_t index = passed;
    return std::pair(index, index == 0 ? at : at - milestones[index - 1]);
  };
  LrSchedule result{[schedules, find](std::int64_t at, double base) {
    const auto [index, own] = find(at);
    return schedules[index].rate(own, base);
  }};
  if (momentum) {
    result.momentum = [schedules, find](std::int64_t at) {
      const auto [index, own] = find(at);
      return schedules[index].momentum(own);
    };
  }
  return result;
}

LrSchedule chained(std::vector<LrSchedule> schedules) {
  for (const LrSchedule& one : schedules) {
    MANIPLE_REQUIRE(one.momentum == nullptr,
                    "lr::chained: a schedule that changes momentum cannot be chained (.cycle_momentum = false)");
  }
  return {[schedules = std::move(schedules)](std::int64_t at, double base) {
    if (base == 0) return 0.0;
    double rate = base;
    for (const LrSchedule& one : schedules) rate *= one.rate(at, base) / base;
    return rate;
  }};
}

}  // namespace lr

// ---- LrScheduler ----------------------------------------------------------------------------------------------------

LrScheduler::LrScheduler(torch::optim::Optimizer& optimizer, std::vector<LrSchedule> schedules)
    : optimizers_{&optimizer}, schedules_(std::move(schedules)) {
  const std::size_t groups = optimizer.param_groups().size();
  MANIPLE_REQUIRE(schedules_.size() == groups, "LrScheduler: {} schedules for {} parameter groups", schedules_.size(),
                  groups);
  base_ = lrs();
  set_steps(0);
}

LrScheduler::LrScheduler(torch::optim::Optimizer& optimizer, LrSchedule schedule)
    : optimizers_{&optimizer}, schedules_{std::move(schedule)} {
  base_ = lrs();
  set_steps(0);
}

LrScheduler::LrScheduler(std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers, LrSchedule schedule)
    : owned_(std::move(optimizers)), schedules_{std::move(schedule)} {
  for (const auto& optimizer : owned_) {
    MANIPLE_REQUIRE(optimizer != nullptr, "LrScheduler: one of the optimizers is null");
    optimizers_.push_back(optimizer.get());
  }
  base_ = lrs();
  set_steps(0);
}

std::vector<double> LrScheduler::lrs() const {
  std::vector<double> rates;
  for (const auto* optimizer : optimizers_) {
    for (const auto& group : optimizer->param_groups()) rates.push_back(group.options().get_lr());
  }
  return rates;
}

void LrScheduler::set_steps(std::int64_t steps) {
  MANIPLE_REQUIRE(steps >= 0, "LrScheduler: step {}; steps begin with 0", steps);
  std::size_t place = 0;
  for (auto* optimizer : optimizers_) {
    for (auto& group : optimizer->param_groups()) {
      // A group that was added later starts with its own rate.
      if (place == base_.size()) base_.push_back(group.options().get_lr());
      MANIPLE_REQUIRE(schedules_.size() == 1 || place < schedules_.size(),
                      "LrScheduler: {} schedules, but a further parameter group was added", schedules_.size());
      const LrSchedule& schedule = schedules_[schedules_.size() == 1 ? 0 : place];
      group.options().set_lr(schedule.rate(steps, base_[place]));
      if (schedule.momentum) set_momentum(group.options(), schedule.momentum(steps));
      ++place;
    }
  }
  steps_ = steps;
}

std::string LrScheduler::state_dict() const {
  std::string text = format_text("{} {}", kScheduler, steps_);
  for (const double rate : base_) text += " " + text_of(rate);
  return text;
}

void LrScheduler::load_state_dict(const std::string& saved) {
  const std::vector<std::string> words = words_of(saved, kScheduler, 2);
  std::vector<double> base;
  for (std::size_t i = 2; i < words.size(); ++i) base.push_back(real_of(words[i]));
  MANIPLE_REQUIRE(base.size() == lrs().size(), "LrScheduler: saved for {} parameter groups, here are {}", base.size(),
                  lrs().size());
  base_ = std::move(base);
  set_steps(integer_of(words[1]));
}

// ---- PlateauScheduler -----------------------------------------------------------------------------------------------

PlateauScheduler::PlateauScheduler(torch::optim::Optimizer& optimizer, PlateauOptions options)
    : optimizer_(&optimizer),
      options_(options),
      best_(options.mode == StopMode::max ? -std::numeric_limits<double>::infinity()
                                          : std::numeric_limits<double>::infinity()) {
  MANIPLE_REQUIRE(options.factor < 1, "PlateauScheduler: a factor of {}; expected one below 1", options.factor);
  MANIPLE_REQUIRE(options.patience >= 0 && options.cooldown >= 0,
                  "PlateauScheduler: a patience of {} and a cooldown of {}; expected numbers that are not negative",
                  options.patience, options.cooldown);
}

bool PlateauScheduler::step(double metric) {
  const double sign = options_.mode == StopMode::max ? 1 : -1;
  const double bound = options_.relative ? best_ * (1 + sign * options_.threshold) : best_ + sign * options_.threshold;
  if (options_.mode == StopMode::max ? metric > bound : metric < bound) {
    best_ = metric;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (cooldown_ > 0) {
    --cooldown_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience) return false;
  bad_ = 0;
  cooldown_ = options_.cooldown;
  bool lowered = false;
  for (auto& group : optimizer_->param_groups()) {
    const double before = group.options().get_lr();
    const double after = std::max(before * options_.factor, options_.min_lr);
    if (before - after <= options_.eps) continue;
    group.options().set_lr(after);
    lowered = true;
  }
  return lowered;
}

std::string PlateauScheduler::state_dict() const {
  return format_text("{} {} {} {}", kPlateau, text_of(best_), bad_, cooldown_);
}

void PlateauScheduler::load_state_dict(const std::string& saved) {
  const std::vector<std::string> words = words_of(saved, kPlateau, 4);
  best_ = real_of(words[1]);
  bad_ = static_cast<int>(integer_of(words[2]));
  cooldown_ = static_cast<int>(integer_of(words[3]));
}

}  // namespace maniple
