#include <maniple/train/trainer.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include "train/trainer/evaluation.h"
#include "train/trainer/strategy.h"
#include "train/trainer/training_log.h"
#include <maniple/dist.h>
#include <maniple/train/accumulation.h>
#include <maniple/train/clip_grad.h>

namespace maniple {
namespace {

std::vector<torch::Tensor> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

TrainerOptions checked(TrainerOptions options) {
  MANIPLE_REQUIRE(options.accumulate >= 1, "Trainer: {} batches make a step; expected at least 1", options.accumulate);
  MANIPLE_REQUIRE(options.max_grad_norm >= 0, "Trainer: a max_grad_norm of {}; expected 0 (no clipping) or more",
                  options.max_grad_norm);
  MANIPLE_REQUIRE(
      options.max_steps >= 0 && options.save_every >= 0 && options.evaluate_every >= 0 && options.patience >= 0,
      "Trainer: max_steps {}, save_every {}, evaluate_every {}, patience {}; expected 0 (off) or more",
      options.max_steps, options.save_every, options.evaluate_every, options.patience);
  MANIPLE_REQUIRE(options.log_every >= 1, "Trainer: a row of metrics every {} steps; expected at least 1",
                  options.log_every);
  return options;
}

}  // namespace

struct Trainer::Impl {
  Impl(detail::TrainerModel model, torch::optim::Optimizer& o, TrainerOptions given)
      : optimizer(o),
        options(checked(std::move(given))),
        strategy(made_strategy(std::move(model), o, options)),
        group(strategy->world()),
        metrics(strategy->virtual_ranks() != nullptr ? static_cast<std::size_t>(strategy->virtual_ranks()->count) : 1),
        accumulation(strategy->accumulation(options.accumulate)),
        best_so_far({.patience = options.patience > 0 ? options.patience : std::numeric_limits<int>::max(),
                     .min_delta = options.min_delta,
                     .mode = options.mode,
                     .group = group}) {
    if (options.lr) {
      for (auto& parameters : optimizer.param_groups()) rates.push_back(parameters.options().get_lr());
    }
    for (Metrics& part : metrics) part.add("loss", 0.0, 0);  // the first metric of a row
    if (options.checkpoint.folder.empty()) return;
    options.checkpoint.group = group;
    options.checkpoint.sharded = options.checkpoint.sharded || strategy->divides_model();
    checkpoint = std::make_unique<Checkpoint>(options.checkpoint);
    checkpoint->add("model", strategy->module()).add("optimizer", strategy->optimizer());
    checkpoint->add("trainer", [this] { return state_text(); }, [this](const auto& text) { load_state(text); });
    checkpoint->add(
        "data", [this] { return train == nullptr ? cursor
                                : train->cursor  ? train->cursor()
                                                 : std::string(); },
        [this](const std::string& text) {
          if (train == nullptr || !train->load_cursor) return;
          MANIPLE_REQUIRE(
              !text.empty() || state.batch == 0,
              "Trainer: the checkpoint is of the middle of an epoch of data without a cursor, and this data "
              "has one, which would begin the epoch again; resume with the data that it was saved with");
          if (!text.empty()) train->load_cursor(text);
        });
    checkpoint->add(
        "best_so_far", [this] { return best_so_far.state_dict(); },
        [this](const auto& text) { best_so_far.load_state_dict(text); });
    CheckpointOptions of_best = options.checkpoint;
    of_best.folder += "/best";
    of_best.keep_last = 1;
    best = std::make_unique<Checkpoint>(of_best);
    best->add("model", strategy->module());
  }

  static std::unique_ptr<TrainerStrategy> made_strategy(detail::TrainerModel model, torch::optim::Optimizer& optimizer,
                                                        const TrainerOptions& options) {
    const PublicCall call("the constructor of Trainer, which all ranks call");
    return TrainerStrategy::make(options, {std::move(model), optimizer, options.autocast});
  }

  // ---- State kept in checkpoints ---------------------------------------------------------------------------------

  std::string state_text() const {
    return format_text("epoch {} batch {} step {} samples {} ranks {}\n{}", state.epoch, state.batch, state.step,
                       state.samples, strategy->data_ranks(), strategy->bits_text());
  }
  void load_state(const std::string& text) {
    std::istringstream in(text);
    std::string word;
    TrainerState saved;
    int saved_ranks = 0;
    in >> word >> saved.epoch >> word >> saved.batch >> word >> saved.step >> word >> saved.samples >> word >>
        saved_ranks;
    MANIPLE_REQUIRE(in && word == "ranks", "Trainer: \"{}\" is not a training state", text.substr(0, 80));
    MANIPLE_REQUIRE(
        saved.batch == 0 || train == nullptr || train->cursor || saved_ranks == strategy->data_ranks(),
        "Trainer: the checkpoint is of the middle of an epoch on {} ranks with different batches, here are {}, and the "
        "data has no cursor that could divide the rest anew; resume with {} such ranks, or train on "
        "maniple::sampled(loader, sampler)",
        saved_ranks, strategy->data_ranks(), saved_ranks);
    const std::size_t line = text.find('\n');
    if (line != std::string::npos) strategy->load_bits_text(text.substr(line + 1));
    state = saved;
  }
  void save() {
    if (!checkpoint) return;
    strategy->take_options();
    checkpoint->save(state.step, {});
  }

  // ---- A step ----------------------------------------------------------------------------------------------------

  double rate() const {
    const auto& groups = optimizer.param_groups();
    return groups.empty() ? 0 : groups.front().options().get_lr();
  }

  /// The metrics to which this rank adds: ranks with the same batch count once.
  Metrics& counted(Metrics& kept) { return strategy->reports() ? kept : uncounted; }

  /// The row over `parts`, the metrics of this rank or of each of its virtual ranks.
  MetricRow total_of(std::vector<Metrics>& parts) const {
    const VirtualRanks* const own = strategy->virtual_ranks();
    const int max_parts = own != nullptr ? VirtualRanks::of(own->total, 0, strategy->ranks()).count : 1;
    return Metrics::all_reduce(parts, static_cast<std::size_t>(max_parts), group, {});
  }

  /// Whether a gradient of the optimizer is not finite on any rank. `norm` is the norm of all gradients, if it is
  /// known.
  bool found_nonfinite(torch::Tensor norm) {
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

  void report_nonfinite(const detail::TrainerBatch& batch) {
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
    const std::string error =
        text +
        "; the weights are those before this step. Look at that rank's batch, at the learning rate "
        "and at max_grad_norm; TrainerOptions::nonfinite_gradients can skip such steps";
    if (alone) throw InvalidArgument(error);
    throw_failed_on<InvalidArgument>(*group, rank, error);
  }

  void step_optimizer(const detail::TrainerBatch& batch) {
    torch::Tensor norm;
    for (std::size_t i = 0; i < rates.size(); ++i)
      optimizer.param_groups()[i].options().set_lr(options.lr(state.step, rates[i]));
    strategy->finish_backward();
    if (options.max_grad_norm > 0) {
      if (scaler.unscale) scaler.unscale(strategy->optimizer());
      norm = clip_grad_norm_(parameters_of(strategy->optimizer()), options.max_grad_norm, {}, SourceLocation());
    }
    if (found_nonfinite(norm)) {
      report_nonfinite(batch);
      ++state.step;
      return;
    }
    // All ranks have the same norm; added once, its mean over any number of ranks has the same bits.
    if (norm.defined() && (strategy->virtual_ranks() == nullptr || strategy->virtual_ranks()->first == 0))
      metrics.front().add("grad_norm", norm);
    strategy->take_options();
    if (scaler.step) {
      scaler.step(strategy->optimizer());
      scaler.update();
    } else {
      strategy->optimizer().step();
    }
    ++state.step;
  }

  /// Writes a row for the steps since the previous row, if there are any; all ranks have made the same number of steps.
  void write_row() {
    if (std::exchange(rows_step, state.step) == state.step) return;
    state.train = total_of(metrics);
    log->row("train", state, state.train, rate());
  }

  /// Returns whether the training continues after this batch.
  bool train_on(const detail::TrainerBatch& batch) {
    const bool divided = strategy->virtual_ranks() != nullptr;
    strategy->verify_bits(batch);
    const int turn = accumulation.pending();
    if (turn == 0) {
      strategy->drop_gradients();
      strategy->begin_step();
    }
    Metrics& part = metrics[static_cast<std::size_t>(turn) % metrics.size()];
    strategy->begin_batch(state.step, turn);
    {
      const auto scope = accumulation.step(batch.is_last);
      state.loss = strategy->backward(batch, counted(part), [&](const torch::Tensor& loss) {
        const torch::Tensor scaled = divided ? loss : accumulation.scale(loss, batch.samples);
        return scaler.scale ? scaler.scale(scaled) : scaled;
      });
      counted(part).add("loss", state.loss, batch.samples);
    }
    strategy->end_batch();
    uncounted.reset();
    const bool steps = accumulation.ready();
    if (steps || !divided) {
      ++state.batch;
      state.samples += static_cast<std::int64_t>(batch.samples) * strategy->data_ranks();
    }
    if (!steps) {
      if (!divided) log->batch(batch.samples);
      return true;
    }
    step_optimizer(batch);
    if (state.step % options.log_every == 0) write_row();
    log->batch(divided ? batch.samples * strategy->data_ranks() / strategy->ranks() : batch.samples);
    if (options.schedule) options.schedule();
    if (options.on_step) options.on_step(state);
    if (evaluation != nullptr && options.evaluate_every > 0 && state.step % options.evaluate_every == 0) evaluate_now();
    const bool asked = stop ? stop->requested_anywhere(group, {}) : stop_asked;
    if (best_so_far.should_stop()) {
      state.end = TrainerEnd::early;
    } else if (options.max_steps > 0 && state.step >= options.max_steps) {
      state.end = TrainerEnd::steps;
    } else if (asked) {
      state.end = TrainerEnd::stopped;
    }
    const bool goes_on = state.end == TrainerEnd::none;
    if (!goes_on || (options.save_every > 0 && state.step % options.save_every == 0)) save();
    return goes_on;
  }

  // ---- Evaluations -----------------------------------------------------------------------------------------------

  MetricRow judge(const detail::TrainerData& data) {
    const auto scope = strategy->begin();
    strategy->require_usable(data);
    const torch::NoGradGuard no_grad;
    const ModuleMode mode(strategy->module(), false);
    std::vector<Metrics> judged(metrics.size());
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

  void evaluate_now() {
    state.evaluation = judge(*evaluation);
    log->row("evaluation", state, state.evaluation, rate());
    best_so_far.update(state.evaluation[options.monitor], {});
    if (best && best_so_far.improved()) best->save(state.step, {});
  }

  // ---- The run ---------------------------------------------------------------------------------------------------

  /// Where the training resumes if there is a checkpoint; otherwise empty.
  std::string begin() {
    if (begun) {
      if (state.batch > 0 && train->cursor)
        train->load_cursor(cursor.empty() ? train->cursor() : cursor);  // the next pass begins where it stopped
      return "";
    }
    const bool loaded = checkpoint && checkpoint->load({}, {});
    if (loaded) strategy->give_options();
    begun = true;  // not set if that threw, so that the next call tries again
    if (!loaded) return "";
    return train->cursor ? train->cursor() : format_text("epoch {}, batch {}", state.epoch, state.batch);
  }

  void train_epoch() {
    if (train->set_epoch) train->set_epoch(state.epoch);
    cursor.clear();
    const std::size_t batches = train->batches ? train->batches() / metrics.size() : 0;
    log->begin_epoch(state, options.epochs, train->cursor && batches > 0 ? state.batch + batches : batches);
    accumulation.reset();
    bool is_first = true;
    train->pass(state.batch, options.accumulate > 1, [&](const detail::TrainerBatch& batch) {
      if (std::exchange(is_first, false)) strategy->require_same_batch(batch);
      return train_on(batch);
    });
    log->end_epoch();
    write_row();
    if (state.end != TrainerEnd::none) return;
    if (evaluation != nullptr && options.evaluate_every == 0) evaluate_now();
    ++state.epoch;
    state.batch = 0;
    if (best_so_far.should_stop()) state.end = TrainerEnd::early;
    if (options.on_epoch) options.on_epoch(state);
    save();
  }

  void run() {
    MANIPLE_REQUIRE(options.patience == 0 || evaluation != nullptr,
                    "Trainer: patience {} needs evaluations: give fit() data for them as its second argument",
                    options.patience);
    const auto scope = strategy->begin();
    for (const detail::TrainerData* data : {train, evaluation}) {
      if (data != nullptr) strategy->require_usable(*data);
    }
    state.end = TrainerEnd::none;
    stop_asked = false;
    const std::string resumed = begin();
    rows_step = state.step;
    if (options.graceful_stop) stop.emplace();
    log.emplace(options, group ? group->rank() : 0, is_initialized() && group == get_default_group(), state, resumed);
    const ModuleMode mode(strategy->module(), true);
    while (state.end == TrainerEnd::none) {
      if (best_so_far.should_stop()) {
        state.end = TrainerEnd::early;
      } else if (state.epoch >= options.epochs) {
        state.end = TrainerEnd::epochs;
      } else if (options.max_steps > 0 && state.step >= options.max_steps) {
        state.end = TrainerEnd::steps;
      } else {
        train_epoch();
      }
    }
    // The training was at its end already: evaluate what it has reached.
    if (evaluation != nullptr && state.evaluation.empty() && state.end != TrainerEnd::stopped)
      state.evaluation = judge(*evaluation);
    if (train->cursor) cursor = train->cursor();
    if (checkpoint) checkpoint->wait();
    if (best) best->wait();
  }

  torch::optim::Optimizer& optimizer;  ///< the program's optimizer; strategy->optimizer() steps
  TrainerOptions options;
  std::unique_ptr<TrainerStrategy> strategy;
  std::shared_ptr<ProcessGroup> group;  ///< null: this process alone
  std::vector<Metrics> metrics;         ///< since the previous row; one, or one for each virtual rank of this rank
  Accumulation accumulation;
  EarlyStopping best_so_far;
  detail::TrainerScaler scaler;  ///< empty functions if there is no GradScaler
  std::vector<double> rates;     ///< rates of the optimizer's groups at the beginning, for options.lr
  Metrics uncounted;             ///< metrics of batches that other ranks count
  std::int64_t rows_step = 0;    ///< the step of the previous row
  TrainerState state;
  std::string cursor;  ///< cursor of the data when run() ended
  bool begun = false;
  bool stop_asked = false;

  // Set while run() runs.
  const detail::TrainerData* train = nullptr;
  const detail::TrainerData* evaluation = nullptr;
  std::optional<GracefulStop> stop;
  std::optional<TrainingLog> log;

  std::unique_ptr<Checkpoint> checkpoint;  ///< last: a save in progress must end before other members are destroyed
  std::unique_ptr<Checkpoint> best;
};

Trainer::Trainer(detail::TrainerModel model, torch::optim::Optimizer& optimizer, TrainerOptions options)
    : impl_(std::make_unique<Impl>(std::move(model), optimizer, std::move(options))) {}
Trainer::~Trainer() = default;

const TrainerState& Trainer::run(const detail::TrainerData& train, const detail::TrainerData* evaluation,
                                 const SourceLocation& where) {
  const PublicCall call("Trainer::fit, which all ranks call", where);
  impl_->train = &train;
  impl_->evaluation = evaluation;
  struct Ends {
    Impl& impl;
    ~Ends() {
      impl.train = impl.evaluation = nullptr;
      impl.stop.reset();  // restores the signal handlers
      impl.log.reset();
    }
  } ends{*impl_};
  impl_->run();
  return impl_->state;
}

MetricRow Trainer::judge(const detail::TrainerData& data, const SourceLocation& where) {
  const PublicCall call("Trainer::evaluate, which all ranks call", where);
  return impl_->judge(data);
}

void Trainer::set_scaler(detail::TrainerScaler scaler) { impl_->scaler = std::move(scaler); }

void Trainer::stop() noexcept {
  impl_->stop_asked = true;
  if (impl_->stop) impl_->stop->request();
}

const TrainerState& Trainer::state() const noexcept { return impl_->state; }
Checkpoint* Trainer::checkpoint() noexcept { return impl_->checkpoint.get(); }
detail::DdpBase* Trainer::ddp() noexcept { return impl_->strategy->ddp(); }
torch::nn::Module& Trainer::module() noexcept { return impl_->strategy->module(); }
int Trainer::rank() const noexcept { return impl_->group ? impl_->group->rank() : 0; }
int Trainer::ranks() const noexcept { return impl_->strategy->ranks(); }

}  // namespace maniple
