// A complete training loop, on one rank or many. The program supplies a model, an optimizer, data and a loss.
//
//   maniple::init_process_group();                                       // or not: then this process trains alone
//   torch::optim::AdamW optimizer(net->parameters(), 1e-3);
//   maniple::Trainer trainer(net, optimizer, {.epochs = 3, .max_grad_norm = 1, .checkpoint = {.folder = "runs/7"}});
//   const auto loss = [&](auto& batch, maniple::Metrics& metrics) {
//     const auto output = net->forward(batch.data);
//     metrics.add_accuracy("accuracy", output, batch.target);
//     return torch::nll_loss(output, batch.target);                      // a mean over the batch
//   };
//   const auto& end = trainer.fit(loader, test_loader, loss);            // a DataLoader, or any range of batches
//   maniple::print_once(end.evaluation.text());                          // loss 0.0812  accuracy 0.975
//
// Each piece is a class of its own, for use in hand-written loops as well (docs/training.md): DistributedDataParallel,
// Accumulation, clip_grad_norm_, Metrics, Checkpoint, GracefulStop, EarlyStopping, Progress, SummaryWriter. The Trainer
// runs them in this order:
//
//   for each batch    forward and backward; no communication (no_sync) until `accumulate` batches make a step
//   for each step     clipping, the optimizer's step, `schedule`, on_step; then, at the intervals in the options, a
//                     row of metrics, an evaluation and a checkpoint; all ranks agree whether to stop
//   for each epoch    an evaluation, early stopping, on_epoch, a checkpoint
//
// Data            Any range of batches: a container, a torch::data loader, a class with begin() and end(). If it has
//                 set_epoch(n), the trainer calls it with the epoch number. In training all ranks have the same number
//                 of batches (otherwise see uneven_inputs.h); in an evaluation the numbers may differ. A batch is
//                 finished before the next one is fetched, so a range may reuse its tensors. Exception: with
//                 `accumulate` above 1, the trainer fetches one batch ahead from a range without a cursor, to recognize
//                 the last one. For single-pass iterators it then copies the batch's tensors (tensor_nest.h).
// Resuming        With a checkpoint folder, fit() resumes from the newest checkpoint. After a kill at any moment the
//                 final weights are bit for bit the same as without interruption. In the middle of an epoch, data with
//                 a cursor (`sampled`, or any class with set_epoch, batches, cursor_text and load_cursor) resumes at
//                 its position, also on another number of ranks. Of other ranges the finished batches are skipped, so
//                 such a range must produce the same batches in each run. The state of communication hooks (errors of
//                 powerSGD and int8, counts of post-local SGD) is not part of checkpoints.
// Gradients       All gradients are cleared (undefined, not zero) before each step, including gradients of parameters
//                 that the optimizer does not have. Clipping covers the optimizer's parameters only.
// Modes           A model in training mode is left as it is: submodules that the program has put in evaluation mode
//                 stay in it.
// Evaluation      Each sample counts once, and sums over ranks are weighted by counts: pass data whose sampler uses
//                 SamplerMode::evaluation. The model is in evaluation mode, and no gradients are recorded.
//                 `at("loss").count` of the row is the number of samples.
// Stopping        SIGINT and SIGTERM end fit() after the current step, on all ranks, with a checkpoint. stop() does the
//                 same.
// Logs            On rank 0: a progress line, and "epoch 2: loss 0.0812  accuracy 0.975" after the evaluation of an
//                 epoch. With log_dir also curves for TensorBoard ("train/loss", "evaluation/loss") and log.jsonl, one
//                 JSON object per line: kind, epoch, step, samples, seconds, lr, and the metrics (NaN is written as
//                 null).
//
// fit() and evaluate() are collectives: all ranks call them, with the same options, from one thread. They throw the
// errors of the classes above; wrong options throw InvalidArgument.
//
// The loop is the same with every strategy (strategy.h): DataParallel, Zero1, FullySharded, TensorParallel, Pipeline.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/checkpoint.h>
#include <maniple/train/ddp.h>
#include <maniple/train/metrics.h>
#include <maniple/train/sampler.h>
#include <maniple/train/stop.h>
#include <maniple/train/strategy.h>
#include <maniple/train/tensor_nest.h>
#include <maniple/train/virtual_ranks.h>

namespace MANIPLE_API maniple {

enum class TrainerEnd {
  none,     ///< fit() has not ended
  epochs,   ///< all epochs are done
  steps,    ///< max_steps are done
  stopped,  ///< by a signal or stop(): another fit(), here or in a new process, resumes
  early,    ///< the monitored metric stopped improving
};

/// What a Trainer does when an averaged gradient is infinite or NaN (it then is on every rank).
enum class NonfiniteGradients {
  automatic,  ///< stop on the CPU; ignore on a GPU, where the check would wait for the device in every step
  stop,       ///< throws InvalidArgument on all ranks, naming rank and parameter of the origin; weights stay unchanged
  skip,       ///< skips the step on all ranks, with a warning; the skipped step counts as a step
  ignore,     ///< no check: the optimizer receives them
};

/// Training progress.
struct TrainerState {
  std::size_t epoch = 0;               ///< finished epochs; in on_epoch, including this one
  std::size_t batch = 0;               ///< finished batches of the current epoch, on each rank or virtual rank
  std::int64_t step = 0;               ///< optimizer steps
  std::int64_t samples = 0;            ///< of all ranks, assuming that their batches have equal sizes
  torch::Tensor loss = {};             ///< of this rank's latest batch; not copied from its device
  MetricRow train = MetricRow();       ///< the latest row: over all ranks and all steps since the previous row
  MetricRow evaluation = MetricRow();  ///< the latest evaluation; empty before the first: see MetricRow::value_or
  TrainerEnd end = TrainerEnd::none;
};

struct TrainerOptions {
  std::size_t epochs = 1;      ///< total, including epochs before a restart
  std::int64_t max_steps = 0;  ///< limit on optimizer steps; 0: no limit but `epochs`
  int accumulate = 1;          ///< batches per step; the last step of an epoch may have fewer, if their number is known
  double max_grad_norm = 0;    ///< see clip_grad_norm_; the metric "grad_norm" is the norm before it. 0: no clipping

  /// What to do about gradients that are not finite. The check reads all gradients once per step (with max_grad_norm
  /// only their norm); on a GPU the host waits for the device. With a GradScaler nothing is checked, because it skips
  /// such steps itself.
  NonfiniteGradients nonfinite_gradients = NonfiniteGradients::automatic;

  /// Learning rate at step `step` (from 0) for a parameter group whose rate was `base` when the trainer was made. It
  /// depends on the step alone, so checkpoints hold nothing of it.
  std::function<double(std::int64_t step, double base)> lr = nullptr;
  /// Called after each optimizer step: `[&] { scheduler.step(); }`. trainer.add("scheduler", scheduler) puts the
  /// scheduler's state into checkpoints.
  std::function<void()> schedule = nullptr;

  /// Mixed precision. The object that this function returns exists during each forward:
  /// `[] { return std::make_shared<maniple::Autocast>(torch::kCUDA); }`. For float16 also call trainer.use(scaler).
  std::function<std::shared_ptr<void>()> autocast = nullptr;

  /// With a folder, fit() saves a checkpoint at the end of each epoch, every `save_every` steps, and when it is
  /// stopped. The best model by `monitor` is kept in the subfolder "best". Empty folder: no checkpoints.
  CheckpointOptions checkpoint = {};
  std::int64_t save_every = 0;

  /// Steps between evaluations; 0: at the end of each epoch.
  std::int64_t evaluate_every = 0;
  /// The evaluation metric that selects the best model; `mode` says whether smaller or larger is better.
  std::string monitor = "loss";
  StopMode mode = StopMode::min;
  int patience = 0;      ///< stop after this many evaluations without improvement; 0 disables early stopping
  double min_delta = 0;  ///< an improvement must exceed this value

  bool graceful_stop = true;    ///< false: signals are not handled, and stop() is called on all ranks at the same step
  std::int64_t log_every = 50;  ///< steps per row of metrics; the last row of an epoch may cover fewer
  bool progress = true;         ///< show a progress line on stderr
  std::string log_dir = {};     ///< where TensorBoard curves and log.jsonl go; empty: neither is written

  std::function<void(const TrainerState&)> on_step = nullptr;
  std::function<void(const TrainerState&)> on_epoch = nullptr;

  /// How the ranks divide the training. The trainer uses the strategy's group. Null: the default group, or, without
  /// one, this process trains alone. Strategies that divide the model (all but DataParallel and Zero1) save sharded
  /// checkpoints.
  Strategy strategy = strategy::DataParallel{};

  /// Above 0: every step consists of this many batches, one for each virtual rank, and results do not depend on the
  /// number of ranks. See docs/elastic.md for the rules; the trainer refuses by name what would break them. The data
  /// needs divide(): a DataLoader or sampled(), and its batch size is the batch size of one virtual rank. CPU only,
  /// with strategy DataParallel.
  int virtual_ranks = 0;
  /// With virtual_ranks: LibTorch's threads per operation during fit() and evaluate(), instead of the process's own
  /// number. Part of the results: another number gives other bits.
  int virtual_threads = 1;
  /// With virtual_ranks: continue, with a warning, where ranks or a checkpoint are known to give different bits.
  bool allow_different_bits = false;
};

namespace detail {

/// One batch, bound to the loss function.
struct TrainerBatch {
  std::function<torch::Tensor(Metrics&)> loss;  ///< null with a criterion
  torch::Tensor data, target;                   ///< with a criterion
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target, Metrics&)> criterion;
  std::function<std::vector<torch::Tensor>()> tensors;
  double samples = 1;
  bool is_last = false;  ///< the last batch of the pass
};

/// A model of any class, type-erased for the trainer.
struct TrainerModel {
  TrainerModel(std::shared_ptr<torch::nn::Module> given) : module(std::move(given)) {}  // NOLINT: converts on purpose
  template <class Module>
  static TrainerModel of(const std::shared_ptr<Module>& module) {
    TrainerModel model(module);
    if constexpr (requires(torch::Tensor x) {
                    { module->forward(x) } -> std::convertible_to<torch::Tensor>;
                  }) {
      model.forward = [raw = module.get()](torch::Tensor data) -> torch::Tensor {
        return raw->forward(std::move(data));
      };
    }
    return model;
  }
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(torch::Tensor)> forward;  ///< null: unknown, or it does not take one tensor
};

/// Data and loss of any types, type-erased for the trainer.
struct TrainerData {
  std::function<void(std::size_t epoch)> set_epoch;
  std::function<std::size_t()> batches;  ///< of the next pass; 0: unknown
  /// One pass without its first `skip` batches, until `each` returns false. Without `look_ahead`, is_last may stay
  /// false for the last batch.
  std::function<void(std::size_t skip, bool look_ahead, const std::function<bool(const TrainerBatch&)>& each)> pass;
  std::function<std::string()> cursor;  ///< null: the data has no cursor, and the trainer counts batches
  std::function<void(const std::string&)> load_cursor;
  std::function<void(const VirtualRanks&)> divide;  ///< null: the data cannot be divided over virtual ranks
  bool has_criterion = false;
};

/// A GradScaler of any class.
struct TrainerScaler {
  std::function<torch::Tensor(const torch::Tensor&)> scale;
  std::function<void(torch::optim::Optimizer&)> unscale;
  std::function<void(torch::optim::Optimizer&)> step;
  std::function<void()> update;
};

template <class Data>
concept HasCursor = requires(Data& data, std::size_t epoch, const std::string& text) {
  data.set_epoch(epoch);
  { data.cursor_text() } -> std::convertible_to<std::string>;
  data.load_cursor(text);
  { data.batches() } -> std::convertible_to<std::size_t>;
};

/// Number of samples in a batch: the first dimension of its data, or of its first tensor.
template <class Batch>
double samples_of(const Batch& batch) {
  if constexpr (requires { batch.data.size(0); }) {
    return static_cast<double>(batch.data.size(0));
  } else {
    for (const torch::Tensor& tensor : tensors_in(batch))
      if (tensor.dim() > 0) return static_cast<double>(tensor.size(0));
    return 1;
  }
}

template <class Batch>
Batch with_own_tensors(const Batch& batch) {
  std::vector<torch::Tensor> tensors = tensors_in(batch);
  for (torch::Tensor& tensor : tensors)
    if (tensor.defined()) tensor = tensor.clone();
  return with_tensors(batch, tensors);
}

template <class Loss>
struct IsCriterion : std::false_type {};
template <class Function>
struct IsCriterion<Criterion<Function>> : std::true_type {};

template <class Batch, class Loss>
TrainerBatch trainer_batch(Batch& batch, Loss& loss, bool is_last) {
  TrainerBatch made;
  if constexpr (IsCriterion<std::remove_const_t<Loss>>::value) {
    made.data = batch.data;
    made.target = batch.target;
    made.criterion = [&loss](const torch::Tensor& output, const torch::Tensor& target,
                             Metrics& metrics) -> torch::Tensor {
      if constexpr (std::is_invocable_v<decltype(loss.function), const torch::Tensor&, const torch::Tensor&,
                                        Metrics&>) {
        return loss.function(output, target, metrics);
      } else {
        return loss.function(output, target);
      }
    };
  } else {
    made.loss = [&batch, &loss](Metrics& metrics) -> torch::Tensor {
      if constexpr (std::is_invocable_v<Loss&, Batch&, Metrics&>) {
        return loss(batch, metrics);
      } else {
        return loss(batch);
      }
    };
  }
  made.tensors = [&batch] { return tensors_in(batch); };
  made.samples = samples_of(batch);
  made.is_last = is_last;
  return made;
}

template <class Data, class Loss>
TrainerData trainer_data(Data& data, Loss& loss) {
  TrainerData made;
  made.has_criterion = IsCriterion<std::remove_const_t<Loss>>::value;
  if constexpr (requires { data.set_epoch(std::size_t{0}); }) {
    made.set_epoch = [&data](std::size_t epoch) { data.set_epoch(epoch); };
  }
  if constexpr (requires(const VirtualRanks& ranks) { data.divide(ranks); }) {
    made.divide = [&data](const VirtualRanks& ranks) { data.divide(ranks); };
  }
  if constexpr (HasCursor<Data>) {
    made.batches = [&data] { return static_cast<std::size_t>(data.batches()); };
    made.cursor = [&data] { return std::string(data.cursor_text()); };
    made.load_cursor = [&data](const std::string& text) { data.load_cursor(text); };
    made.pass = [&data, &loss](std::size_t, bool, const auto& each) {
      std::size_t left = data.batches();
      for (auto& batch : data)
        if (!each(trainer_batch(batch, loss, --left == 0))) break;
    };
  } else {
    if constexpr (requires {
                    { data.size() } -> std::convertible_to<std::size_t>;
                  }) {
      made.batches = [&data] { return static_cast<std::size_t>(data.size()); };
    }
    made.pass = [&data, &loss](std::size_t skip, bool look_ahead, const auto& each) {
      auto next = std::begin(data);
      auto end = std::end(data);
      for (; skip > 0 && next != end; --skip) ++next;
      while (next != end) {
        auto batch = *next;
        if (!look_ahead) {
          if (!each(trainer_batch(batch, loss, false))) break;
          ++next;
          continue;
        }
        if constexpr (!std::forward_iterator<decltype(next)>) batch = with_own_tensors(batch);  // ++ may overwrite them
        ++next;
        if (!each(trainer_batch(batch, loss, !(next != end)))) break;
      }
    };
  }
  return made;
}

}  // namespace detail

/// A torch::data loader together with its sampler, so that training can resume in the middle of an epoch. The loader
/// must outlive this object.
template <class Loader>
class SampledData {
 public:
  SampledData(Loader& loader, DistributedSampler sampler) : loader_(&loader), sampler_(std::move(sampler)) {}

  void set_epoch(std::size_t epoch) { sampler_.set_epoch(epoch); }
  std::size_t batches() const {
    const auto& options = loader_->options();
    return sampler_.local_batches(options.batch_size, options.drop_last);
  }
  /// See DistributedSampler::divide.
  void divide(const VirtualRanks& ranks) { sampler_.divide(ranks); }
  std::string cursor_text() const { return sampler_.cursor_text(); }
  void load_cursor(const std::string& text) { sampler_.load_cursor(text); }
  auto begin() { return sampler_.counting(*loader_).begin(); }
  auto end() { return sampler_.counting(*loader_).end(); }

 private:
  Loader* loader_;
  DistributedSampler sampler_;
};
template <class Loader>
SampledData<Loader> sampled(Loader& loader, DistributedSampler sampler) {
  return SampledData<Loader>(loader, std::move(sampler));
}

class Trainer {
 public:
  /// Collective over all ranks of the strategy; copies rank 0's parameters and buffers to all of them. The optimizer
  /// holds the model's parameters and must outlive the trainer. Throws InvalidArgument, before anything is changed, for
  /// a model or an optimizer that the strategy cannot train.
  template <std::derived_from<torch::nn::Module> Module>
  Trainer(const std::shared_ptr<Module>& model, torch::optim::Optimizer& optimizer, TrainerOptions options = {})
      : Trainer(detail::TrainerModel::of(model), optimizer, std::move(options)) {}
  template <class Module>
  Trainer(const torch::nn::ModuleHolder<Module>& model, torch::optim::Optimizer& optimizer, TrainerOptions options = {})
      : Trainer(detail::TrainerModel::of(model.ptr()), optimizer, std::move(options)) {}
  ~Trainer();  ///< waits for a checkpoint that is being written
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Adds program state to the checkpoints: everything that Checkpoint::add takes. Call it before fit(). Without
  /// checkpoints it does nothing.
  template <class... Things>
  Trainer& add(const std::string& name, Things&&... things) {
    if (Checkpoint* kept = checkpoint()) kept->add(name, std::forward<Things>(things)...);
    return *this;
  }

  /// A GradScaler for float16. The trainer scales the loss, skips steps with non-finite gradients (they count as
  /// steps), and saves the scaler in checkpoints as "scaler". Call it before fit(); the scaler must outlive the
  /// trainer.
  template <class Scaler>
  Trainer& use(Scaler& scaler) {
    set_scaler({[&scaler](const torch::Tensor& loss) { return scaler.scale(loss); },
                [&scaler](torch::optim::Optimizer& optimizer) { scaler.unscale_(optimizer); },
                [&scaler](torch::optim::Optimizer& optimizer) { scaler.step(optimizer); },
                [&scaler] { scaler.update(); }});
    return add(
        "scaler", [&scaler] { return std::string(scaler.state_dict()); },
        [&scaler](const std::string& text) { scaler.load_state_dict(text); });
  }

  /// Trains until the end given by the options. The loss is a function `loss(batch, metrics)` or `loss(batch)` that
  /// returns a tensor of one element, the mean over the batch; or a criterion() (strategy.h). The program may add
  /// metrics of any name but "loss" and "grad_norm", which belong to the trainer. After stop(), max_steps or a signal
  /// another call continues.
  template <class Data, class Loss>
  const TrainerState& fit(Data&& train, Loss&& loss, const SourceLocation& where = SourceLocation::current()) {
    return run(detail::trainer_data(train, loss), nullptr, where);
  }
  template <class Data, class Evaluation, class Loss>
  const TrainerState& fit(Data&& train, Evaluation&& evaluation, Loss&& loss,
                          const SourceLocation& where = SourceLocation::current()) {
    const auto judged = detail::trainer_data(evaluation, loss);
    return run(detail::trainer_data(train, loss), &judged, where);
  }

  /// Metrics over all batches of all ranks.
  template <class Data, class Loss>
  MetricRow evaluate(Data&& data, Loss&& loss, const SourceLocation& where = SourceLocation::current()) {
    return judge(detail::trainer_data(data, loss), where);
  }

  /// Makes fit() end after the current step. Call it from a hook, on any rank.
  void stop() noexcept;

  const TrainerState& state() const noexcept;
  Checkpoint* checkpoint() noexcept;  ///< null without checkpoints
  detail::DdpBase* ddp() noexcept;    ///< null if this process trains alone, or the strategy does not use it
  /// The model as the strategy holds it, with the names used in checkpoints: for save_weights, full_parameters,
  /// fully_sharded_summary.
  torch::nn::Module& module() noexcept;
  int rank() const noexcept;   ///< 0 without a group
  int ranks() const noexcept;  ///< 1 without a group

 private:
  Trainer(detail::TrainerModel model, torch::optim::Optimizer& optimizer, TrainerOptions options);
  const TrainerState& run(const detail::TrainerData& train, const detail::TrainerData* evaluation,
                          const SourceLocation& where);
  MetricRow judge(const detail::TrainerData& data, const SourceLocation& where);
  void set_scaler(detail::TrainerScaler scaler);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
