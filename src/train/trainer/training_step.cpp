// A step of the Trainer, and an evaluation.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/elastic.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include "train/trainer/elastic_training.h"
#include "train/trainer/evaluation.h"
#include "train/trainer/trainer_impl.h"
#include <maniple/dist.h>
#include <maniple/train/clip_grad.h>

namespace maniple {
namespace {

std::vector<torch::Tensor> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

}  // namespace

double Trainer::Impl::rate() const {
  const auto& groups = optimizer.param_groups();
  return groups.empty() ? 0 : groups.front().options().get_lr();
}

void Trainer::Impl::make_metrics() {
  const VirtualRanks* const own = strategy->virtual_ranks();
  metrics.resize(own == nullptr ? 1 : static_cast<std::size_t>(elastic ? own->total : own->count));
  for (Metrics& part : metrics) part.add("loss", 0.0, 0);  // the first metric of a row
  step_parts.assign(own == nullptr ? 0 : static_cast<std::size_t>(own->count), {});
}

/// Adds the metrics of the step to those since the previous row. In an elastic job all ranks keep the metrics of all
/// virtual ranks, since a rank may be lost before the next row.
void Trainer::Impl::commit_metrics() {
  const VirtualRanks* const own = strategy->virtual_ranks();
  if (own == nullptr) return;
  if (elastic && group && group->size() > 1) {
    std::vector<std::string> texts;
    for (const Metrics& part : step_parts) texts.push_back(part.state_dict());
    const auto all = group->all_gather_objects(joined(texts, "\n"), {}, public_place());
    for (int rank = 0; rank < group->size(); ++rank) {
      std::istringstream parts(all[static_cast<std::size_t>(rank)]);
      const VirtualRanks theirs = VirtualRanks::of(own->total, rank, group->size());
      for (int i = 0; i < theirs.count; ++i) {
        std::string text;
        std::getline(parts, text);
        Metrics part;
        part.load_state_dict(text);
        metrics[static_cast<std::size_t>(theirs.first + i)].merge(part);
      }
    }
  } else {
    for (std::size_t i = 0; i < step_parts.size(); ++i)
      metrics[i + static_cast<std::size_t>(elastic ? own->first : 0)].merge(step_parts[i]);
  }
  for (Metrics& part : step_parts) part.reset();
}

/// The row over `parts`, the metrics of this rank, of each of its virtual ranks, or of all virtual ranks.
MetricRow Trainer::Impl::total_of(std::vector<Metrics>& parts) const {
  const VirtualRanks* const own = strategy->virtual_ranks();
  if (own != nullptr && parts.size() == static_cast<std::size_t>(own->total)) return Metrics::row_of(parts);
  const int max_parts = own != nullptr ? VirtualRanks::of(own->total, 0, strategy->ranks()).count : 1;
  return Metrics::all_reduce(parts, static_cast<std::size_t>(max_parts), group, {});
}

/// Whether a gradient of the optimizer is not finite on any rank. `norm` is the norm of all gradients, if it is
/// known.
bool Trainer::Impl::found_nonfinite(torch::Tensor norm) {
  if (options.nonfinite_gradients == NonfiniteGradients::ignore || scaler.step) return false;
  const std::vector<torch::Tensor> parameters = parameters_of(strategy->optimizer());
  const auto is_on_cpu = [](const torch::Tensor& parameter) { return parameter.is_cpu(); };
  if (options.nonfinite_gradients == NonfiniteGradients::automatic &&
      !std::all_of(parameters.begin(), parameters.end(), is_on_cpu)) {
    return false;
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (!norm.defined()) norm = clip_grad_norm_(parameters, kInfinity, {.norm_type = kInfinity}, SourceLocation());
  std::uint8_t found = std::isfinite(norm.item<double>()) ? 0 : 1;
  // With some communication hooks, and with sharded parameters, gradients differ between ranks.
  if (group && group->size() > 1) group->all_reduce(buffer_of(found), ReduceOp::max, {}, public_place());
  return found != 0;
}

void Trainer::Impl::report_nonfinite(const detail::TrainerBatch& batch) {
  const std::string mine = strategy->nonfinite_in(batch);
  const bool alone = !group || group->size() == 1;
  const auto all = alone ? std::vector{mine} : group->all_gather_objects(mine, {}, public_place());
  const auto first = std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
  const auto rank = static_cast<int>(first == all.end() ? 0 : first - all.begin());
  const std::string where =
      first != all.end()
          ? format_text("on rank {} {}", rank, *first)
          : "though this batch gives finite ones when it is computed again (an earlier batch of the step, or chance)";
  const std::string text = format_text("Trainer: gradients of step {} are not finite: {}", state.step, where);
  if (options.nonfinite_gradients == NonfiniteGradients::skip) {
    if (!group || group->rank() == 0) log_warning("{}; the step is left out on all ranks", text);
    return;
  }
  const std::string error = text +
                            "; the weights are those before this step. Look at that rank's batch, at the learning rate "
                            "and at max_grad_norm; TrainerOptions::nonfinite_gradients can skip such steps";
  if (alone) throw InvalidArgument(error);
  throw_failed_on<InvalidArgument>(*group, rank, error);
}

void Trainer::Impl::step_optimizer(const detail::TrainerBatch& batch) {
  torch::Tensor norm;
  for (std::size_t i = 0; i < rates.size(); ++i)
    optimizer.param_groups()[i].options().set_lr(options.lr(state.step, rates[i]));
  strategy->finish_backward();
  if (options.max_grad_norm > 0) {
    if (scaler.unscale) scaler.unscale(strategy->optimizer());
    norm = clip_grad_norm_(parameters_of(strategy->optimizer()), options.max_grad_norm, {}, SourceLocation());
  }
  const bool skips = found_nonfinite(norm);
  if (skips) report_nonfinite(batch);
  // All ranks have the same norm; added once, its mean over any number of ranks has the same bits.
  if (!skips && norm.defined() && !divided()) metrics.front().add("grad_norm", norm);
  if (!skips && norm.defined() && divided() && strategy->virtual_ranks()->first == 0)
    step_parts.front().add("grad_norm", norm);
  commit_metrics();
  // From here on nothing communicates until the step is committed.
  if (!skips) {
    strategy->take_options();
    if (scaler.step) {
      scaler.step(strategy->optimizer());
      scaler.update();
    } else {
      strategy->optimizer().step();
    }
  }
  ++state.step;
}

/// Writes a row for the steps since the previous row, if there are any; all ranks have made the same number of steps.
void Trainer::Impl::write_row() {
  if (rows_step == state.step) return;
  state.train = total_of(metrics);
  rows_step = state.step;
  for (Metrics& part : metrics) part.add("loss", 0.0, 0);
  last_row = log->row("train", state, state.train, rate());
}

/// Returns whether the training continues after this batch.
bool Trainer::Impl::train_on(const detail::TrainerBatch& batch) {
  const int turn = accumulation->pending();
  if (elastic && turn == 0 && has_next_generation()) throw MembersChange();
  strategy->verify_bits(batch);
  proven = true;
  if (turn == 0) {
    strategy->drop_gradients();
    strategy->begin_step();
    for (Metrics& part : step_parts) part.reset();
  }
  Metrics& part = divided() ? step_parts[static_cast<std::size_t>(turn)] : metrics.front();
  strategy->begin_batch(state.step, turn);
  {
    const auto scope = accumulation->step(batch.is_last);
    state.loss = strategy->backward(batch, counted(part), [&](const torch::Tensor& loss) {
      const torch::Tensor scaled = divided() ? loss : accumulation->scale(loss, batch.samples);
      return scaler.scale ? scaler.scale(scaled) : scaled;
    });
    counted(part).add("loss", state.loss, batch.samples);
  }
  strategy->end_batch();
  uncounted.reset();
  const bool steps = accumulation->ready();
  const auto count_batch = [&] {
    ++state.batch;
    state.samples += static_cast<std::int64_t>(batch.samples) * strategy->data_ranks();
  };
  if (!divided()) count_batch();
  if (!steps) {
    if (!divided()) log->batch(batch.samples);
    return true;
  }
  step_optimizer(batch);
  if (divided()) count_batch();
  strategy->end_step();
  if (elastic) {
    cursor = train->cursor();
    newcomers.clear();
  }
  stage = Stage::committed;
  log->batch(divided() ? batch.samples * strategy->data_ranks() / strategy->ranks() : batch.samples);
  return after_step();
}

/// What follows a committed step. Returns whether the training continues.
bool Trainer::Impl::after_step() {
  reach(Stage::step_row, [&] {
    if (state.step % options.log_every == 0) write_row();
  });
  reach(Stage::hooks, [&] {
    if (options.schedule) options.schedule();
    if (options.on_step) options.on_step(state);
  });
  const bool evaluates =
      evaluation != nullptr && options.evaluate_every > 0 && state.step % options.evaluate_every == 0;
  reach(Stage::evaluated, [&] {
    if (evaluates) evaluate_now();
  });
  reach(Stage::kept_best, [&] {
    if (evaluates) keep_best();
  });
  reach(Stage::decided, [&] {
    const bool stops = stops_here();
    if (best_so_far.should_stop()) {
      state.end = TrainerEnd::early;
    } else if (options.max_steps > 0 && state.step >= options.max_steps) {
      state.end = TrainerEnd::steps;
    } else if (stops) {
      state.end = TrainerEnd::stopped;
    }
    if (state.end != TrainerEnd::none || (options.save_every > 0 && state.step % options.save_every == 0)) save();
  });
  return state.end == TrainerEnd::none;
}

/// Whether stop() or a signal ends the training on all ranks. In an elastic job, ranks that get a signal leave, and the
/// others go on; if all of them do, the training ends.
bool Trainer::Impl::stops_here() {
  if (!stop) return stop_asked;
  if (!elastic) return stop->requested_anywhere(group, {});
  const bool leaves = stop->requested() && !stop_asked && !launcher_ends();
  std::array<std::int32_t, 2> ranks = {stop->requested() && !leaves ? 1 : 0, leaves ? 1 : 0};  // that end, that leave
  if (group && group->size() > 1) group->all_reduce(buffer_of(ranks), ReduceOp::sum, {}, public_place());
  if (ranks[0] > 0 || ranks[1] == strategy->ranks()) return true;
  if (leaves) throw Leaves{format_text("this process leaves the job after step {}", state.step)};
  if (ranks[1] > 0) throw MembersChange();
  return false;
}

// ---- Evaluations ----------------------------------------------------------------------------------------------------

MetricRow Trainer::Impl::judge(const detail::TrainerData& data) {
  const auto scope = strategy->begin();
  strategy->require_usable(data);
  const torch::NoGradGuard no_grad;
  const ModuleMode mode(strategy->module(), false);
  std::vector<Metrics> judged(divided() ? step_parts.size() : 1);
  for (Metrics& part : judged) part.add("loss", 0.0, 0);
  const auto compute = [&](const detail::TrainerBatch& batch, Metrics& to) {
    to.add("loss", strategy->loss_of(batch, to), batch.samples);
    uncounted.reset();
  };
  Rounds rounds(strategy->forward_group());
  std::size_t batches = 0;
  data.pass(0, rounds.together(), [&](const detail::TrainerBatch& batch) {
    if (batches == 0) strategy->require_same_batch(batch);
    rounds.begin();
    const std::size_t turn = batches % judged.size();
    strategy->begin_batch(static_cast<std::int64_t>(batches++ / judged.size()), static_cast<int>(turn));
    compute(batch, counted(judged[turn]));
    while (batch.is_last && rounds.others_go_on()) compute(batch, uncounted);
    return true;
  });
  rounds.end();
  return total_of(judged);
}

void Trainer::Impl::evaluate_now() {
  state.evaluation = judge(*evaluation);
  last_row = log->row("evaluation", state, state.evaluation, rate());
  best_so_far.update(state.evaluation[options.monitor], {});
}

void Trainer::Impl::keep_best() {
  if (!best || !best_so_far.improved()) return;
  best->save(state.step, {});
  best_step = state.step;
  if (elastic) best->wait();  // if this rank is lost meanwhile, the others still have these weights
}

}  // namespace maniple
