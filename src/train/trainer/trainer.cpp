#include <maniple/train/trainer.h>

#include <limits>
#include <sstream>
#include <utility>

#include "comm/base/check.h"
#include "comm/group/elastic.h"
#include "train/tensor/public_call.h"
#include "train/trainer/evaluation.h"
#include "train/trainer/trainer_impl.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

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
  MANIPLE_REQUIRE(!is_elastic() || options.virtual_ranks > 0,
                  "Trainer: the members of an elastic job (maniple run --elastic) change, and the results would change "
                  "with them; set TrainerOptions::virtual_ranks");
  return options;
}

}  // namespace

Trainer::Impl::Impl(detail::TrainerModel given_model, torch::optim::Optimizer& o, TrainerOptions given)
    : optimizer(o),
      model(std::move(given_model)),
      options(checked(std::move(given))),
      strategy(made_strategy(model, o, options)),
      group(strategy->world()),
      accumulation(strategy->accumulation(options.accumulate)),
      best_so_far(stopping_options()),
      elastic(is_elastic_job()),
      detached(elastic && (is_detached(*get_default_group()) || get_default_group()->size() > options.virtual_ranks)) {
  if (options.lr) {
    for (auto& parameters : optimizer.param_groups()) rates.push_back(parameters.options().get_lr());
  }
  make_metrics();
  CheckpointOptions of = options.checkpoint;
  if (of.folder.empty() && !elastic) return;
  of.in_memory = of.folder.empty();
  of.group = group;
  of.sharded = of.sharded || strategy->divides_model();
  checkpoint = made_checkpoint(of);
  if (of.in_memory) return;
  CheckpointOptions of_best = of;
  of_best.folder += "/best";
  of_best.keep_last = 1;
  best = std::make_unique<Checkpoint>(of_best);
  best->add("model", strategy->module());
}

EarlyStoppingOptions Trainer::Impl::stopping_options() const {
  return {.patience = options.patience > 0 ? options.patience : std::numeric_limits<int>::max(),
          .min_delta = options.min_delta,
          .mode = options.mode,
          .group = group};
}

/// The parts refer to members of this object that stay when the members of the job change.
std::unique_ptr<Checkpoint> Trainer::Impl::made_checkpoint(CheckpointOptions of) {
  auto made = std::make_unique<Checkpoint>(std::move(of));
  made->add("model", strategy->module()).add("optimizer", strategy->optimizer());
  made->add("trainer", [this] { return state_text(); }, [this](const auto& text) { load_state(text); });
  made->add(
      "data", [this] { return train == nullptr ? cursor
                              : train->cursor  ? train->cursor()
                                               : std::string(); },
      [this](const std::string& text) {
        if (train == nullptr || !train->load_cursor) return;
        MANIPLE_REQUIRE(!text.empty() || state.batch == 0,
                        "Trainer: the checkpoint is of the middle of an epoch of data without a cursor, and this data "
                        "has one, which would begin the epoch again; resume with the data that it was saved with");
        if (!text.empty()) train->load_cursor(text);
      });
  made->add(
      "best_so_far", [this] { return best_so_far.state_dict(); },
      [this](const auto& text) { best_so_far.load_state_dict(text); });
  return made;
}

std::unique_ptr<TrainerStrategy> Trainer::Impl::made_strategy(detail::TrainerModel model,
                                                              torch::optim::Optimizer& optimizer,
                                                              const TrainerOptions& options) {
  const PublicCall call("the constructor of Trainer, which all ranks call");
  return TrainerStrategy::make(options, {std::move(model), optimizer, options.autocast});
}

std::string Trainer::Impl::state_text() const {
  return format_text("epoch {} batch {} step {} samples {} ranks {}\n{}", state.epoch, state.batch, state.step,
                     state.samples, elastic ? options.virtual_ranks : strategy->data_ranks(), bits_text());
}
void Trainer::Impl::load_state(const std::string& text) {
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
  if (line != std::string::npos && strategy) strategy->load_bits_text(text.substr(line + 1));
  if (line != std::string::npos && !strategy) bits = text.substr(line + 1);  // a rank was lost while it was made
  state = saved;
  if (!received.empty()) load_progress(received);
}
void Trainer::Impl::save() {
  if (!checkpoint || options.checkpoint.folder.empty()) return;
  strategy->take_options();
  checkpoint->save(state.step, {});
  saved_step = state.step;
}

// ---- The run
// ---------------------------------------------------------------------------------------------------------

/// Where the training resumes if there is a checkpoint; otherwise empty.
std::string Trainer::Impl::begin() {
  if (begun) {
    if (state.batch > 0 && train->cursor)
      train->load_cursor(cursor.empty() ? train->cursor() : cursor);  // the next pass begins where it stopped
    return "";
  }
  const bool loaded = !options.checkpoint.folder.empty() && checkpoint->load({}, {});
  if (loaded) strategy->give_options();
  begun = true;  // not set if that threw, so that the next call tries again
  if (!loaded) return "";
  return train->cursor ? train->cursor() : format_text("epoch {}, batch {}", state.epoch, state.batch);
}

/// The batches of an epoch that are left.
void Trainer::Impl::train_pass() {
  if (stage != Stage::between_epochs && !after_step()) {  // a step of the previous generation
    stage = Stage::passed;
    return;
  }
  if (train->set_epoch) train->set_epoch(state.epoch);
  if (!elastic) cursor.clear();
  if (elastic && state.batch == 0) cursor = train->cursor();
  const std::size_t parts = divided() ? step_parts.size() : 1;
  const std::size_t batches = train->batches ? train->batches() / parts : 0;
  log->begin_epoch(state, options.epochs, train->cursor && batches > 0 ? state.batch + batches : batches);
  accumulation->reset();
  bool is_first = true;
  train->pass(state.batch, options.accumulate > 1, [&](const detail::TrainerBatch& batch) {
    if (std::exchange(is_first, false)) strategy->require_same_batch(batch);
    return train_on(batch);
  });
  log->end_epoch();
  stage = Stage::passed;
}

/// What follows the last batch of an epoch, or of the training.
void Trainer::Impl::finish_epoch() {
  reach(Stage::epoch_row, [&] { write_row(); });
  if (state.end != TrainerEnd::none) return;
  const bool evaluates = evaluation != nullptr && options.evaluate_every == 0;
  reach(Stage::epoch_evaluated, [&] {
    if (evaluates) evaluate_now();
  });
  reach(Stage::epoch_kept_best, [&] {
    if (evaluates) keep_best();
  });
  reach(Stage::counted, [&] {
    ++state.epoch;
    state.batch = 0;
    if (best_so_far.should_stop()) state.end = TrainerEnd::early;
    if (options.on_epoch) options.on_epoch(state);
  });
  save();
  stage = Stage::between_epochs;
}

void Trainer::Impl::train_to_the_end() {
  while (state.end == TrainerEnd::none || stage != Stage::between_epochs) {
    if (stage == Stage::between_epochs) {
      if (best_so_far.should_stop())
        state.end = TrainerEnd::early;
      else if (state.epoch >= options.epochs)
        state.end = TrainerEnd::epochs;
      else if (options.max_steps > 0 && state.step >= options.max_steps)
        state.end = TrainerEnd::steps;
      if (state.end != TrainerEnd::none) return;
    }
    if (stage < Stage::passed) train_pass();
    finish_epoch();
    if (state.end != TrainerEnd::none) return;
  }
}

void Trainer::Impl::run() {
  MANIPLE_REQUIRE(options.patience == 0 || evaluation != nullptr,
                  "Trainer: patience {} needs evaluations: give fit() data for them as its second argument",
                  options.patience);
  const auto scope = strategy->begin();
  for (const detail::TrainerData* data : {train, evaluation}) {
    if (data != nullptr && !detached) strategy->require_usable(*data);
  }
  MANIPLE_REQUIRE(!elastic || train->cursor,
                  "Trainer: an elastic job (maniple run --elastic) needs data with a cursor, as a DataLoader has: "
                  "cursor_text() and load_cursor()");
  state.end = TrainerEnd::none;
  stage = Stage::between_epochs;
  stop_asked = false;
  const std::string resumed = elastic ? std::string() : begin();
  rows_step = state.step;
  if (options.graceful_stop && elastic)
    stop.emplace(GracefulStopOptions{.signals = {SIGINT, SIGTERM, SIGUSR1}});
  else if (options.graceful_stop)
    stop.emplace();
  log_rank = group ? group->rank() : detached ? 1 : 0;
  log.emplace(options, log_rank, is_initialized() && group == get_default_group(), state, resumed);
  const ModuleMode mode(strategy->module(), true);
  if (elastic) {
    train_among_changes();
  } else {
    train_to_the_end();
  }
  // The training was at its end already: evaluate what it has reached.
  if (evaluation != nullptr && state.evaluation.empty() && state.end != TrainerEnd::stopped)
    state.evaluation = judge(*evaluation);
  if (train->cursor) cursor = train->cursor();
  if (checkpoint) checkpoint->wait();
  if (best) best->wait();
}

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
