// A training loop with what belongs around it, on one rank or many: the program has a model, an optimizer, data and a
// loss.
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
// Each piece is a class of its own, which a loop written by hand uses just as well (docs/training.md):
// DistributedDataParallel, Accumulation, clip_grad_norm_, Metrics, Checkpoint, GracefulStop, EarlyStopping, Progress,
// SummaryWriter. This is their order:
//
//   for each batch    forward and backward; without communication (no_sync) until `accumulate` batches make a step
//   for each step     clipping, the optimizer's step, `schedule`, on_step; then, as often as the options say: a row of
//                     metrics, an evaluation, a checkpoint; and all ranks agree whether one was asked to stop
//   for each epoch    an evaluation, early stopping, on_epoch, a checkpoint
//
// Data            Any range of batches: a container, a loader of torch::data, a class with begin() and end(). One with
//                 set_epoch(n) gets the number of the epoch. All ranks have equally many batches in a training (see
//                 uneven_inputs.h for others); in an evaluation they may differ. A batch is done before the next one is
//                 asked for, so a range may fill the same tensors again. Only with `accumulate` above 1 a range without
//                 a cursor is asked for one batch more than is done, to know the last one; of iterators that go once,
//                 the batch's tensors (tensor_nest.h) are copied for that.
// Resuming        With a checkpoint folder, fit() goes on from the newest checkpoint: after a kill at any moment the
//                 weights at the end are, bit for bit, those of a run that was not disturbed. In the middle of an epoch
//                 data with a cursor (`sampled`, or any class with set_epoch, batches, cursor_text and load_cursor)
//                 goes on there, on another number of ranks too; of other ranges the batches that were done are
//                 skipped, so they must hand out the same ones in each run. What communication hooks keep (errors of
//                 powerSGD and int8, counts of post-local SGD) is not in the checkpoints.
// Gradients       are set to none before each step, those of parameters that the optimizer has not, too; clipped are
//                 the optimizer's.
// Modes           A model that is in training mode stays as it is: parts that the program has put in evaluation mode
//                 remain so.
// Evaluation      Each sample once, and sums over ranks by counts: give it data of a sampler in
//                 SamplerMode::evaluation. The model is in evaluation mode, no gradients are recorded.
//                 `at("loss").count` of the row is the number of samples.
// Stopping        SIGINT and SIGTERM end fit() after the step under way, on all ranks, with a checkpoint. stop() does
//                 so too.
// Logs            On rank 0: a progress line, and "epoch 2: loss 0.0812  accuracy 0.975" after the evaluation of an
//                 epoch; with log_dir also curves for TensorBoard ("train/loss", "evaluation/loss") and log.jsonl, a
//                 JSON object per line: kind, epoch, step, samples, seconds, lr, and the metrics (a NaN is null).
//
// fit() and evaluate() are collectives: all ranks call them, with the same options. One thread. Errors are those of the
// pieces; mistakes in the options are InvalidArgument.
//
// The order is the same with every strategy (strategy.h): DataParallel, Zero1, FullySharded, TensorParallel, Pipeline.
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

namespace MANIPLE_API maniple {

enum class TrainerEnd {
  none,     ///< fit() has not ended
  epochs,   ///< all epochs are done
  steps,    ///< max_steps are done
  stopped,  ///< by a signal or stop(): fit() again, here or in another process, goes on
  early,    ///< the monitored metric no longer got better
};

/// What a Trainer does when a gradient is infinite or NaN after it was averaged, and so on every rank.
enum class NonfiniteGradients {
  automatic,  ///< stop on the CPU; ignore on a GPU, where the check would wait for the device in every step
  stop,    ///< throws InvalidArgument on all ranks, naming the rank and the parameter it began with; the weights are as
           ///< before the step
  skip,    ///< leaves the step out on all ranks, with a warning; it counts as a step
  ignore,  ///< does not look: the optimizer gets them
};

/// How far a training is.
struct TrainerState {
  std::size_t epoch = 0;               ///< epochs that are done; in on_epoch, with this one
  std::size_t batch = 0;               ///< batches of the epoch under way that are done, on each rank
  std::int64_t step = 0;               ///< steps of the optimizer
  std::int64_t samples = 0;            ///< of all ranks, taking their batches to be equally large
  torch::Tensor loss = {};             ///< of the latest batch of this rank; not read from its device
  MetricRow train = MetricRow();       ///< the latest row: over all ranks and the steps since the row before
  MetricRow evaluation = MetricRow();  ///< of the latest evaluation; empty before the first: see MetricRow::value_or
  TrainerEnd end = TrainerEnd::none;
};

struct TrainerOptions {
  std::size_t epochs = 1;      ///< in all, those before a restart included
  std::int64_t max_steps = 0;  ///< of the optimizer; 0: as many as the epochs have
  int accumulate = 1;  ///< batches that make a step; the last of an epoch may have fewer, if their number is known
  double max_grad_norm = 0;  ///< see clip_grad_norm_; the metric "grad_norm" is the norm before. 0: not clipped

  /// Gradients that are not finite. The check reads all gradients once per step, or only their norm with max_grad_norm;
  /// on a GPU the host waits for the device. A GradScaler skips such steps itself, so nothing is checked with one.
  NonfiniteGradients nonfinite_gradients = NonfiniteGradients::automatic;

  /// The learning rate of step n (from 0) of a group of the optimizer that had the rate `base` when the trainer was
  /// made. It depends on n alone, so nothing of it is in checkpoints.
  std::function<double(std::int64_t step, double base)> lr = nullptr;
  /// Called after each step of the optimizer: `[&] { scheduler.step(); }`. Its state goes into checkpoints by
  /// trainer.add("scheduler", scheduler).
  std::function<void()> schedule = nullptr;

  /// Mixed precision: what it makes lives during each forward. `[] { return
  /// std::make_shared<maniple::Autocast>(torch::kCUDA); }`. For float16 also trainer.use(scaler).
  std::function<std::shared_ptr<void>()> autocast = nullptr;

  /// A folder: saves there at the end of each epoch, when fit() is stopped, and every `save_every` steps. The best
  /// model by `monitor` is in its folder "best". Empty: no checkpoints.
  CheckpointOptions checkpoint = {};
  std::int64_t save_every = 0;

  /// Steps between evaluations; 0: at the end of each epoch.
  std::int64_t evaluate_every = 0;
  /// The metric of evaluations by which a model is better than another, and whether that is the smaller or the larger
  /// one.
  std::string monitor = "loss";
  StopMode mode = StopMode::min;
  int patience = 0;  ///< so many evaluations in a row without a better one end the training; 0: it is not ended early
  double min_delta = 0;  ///< what is better by no more than this is not better

  bool graceful_stop = true;    ///< false: signals are left alone, and stop() is called on all ranks at the same step
  std::int64_t log_every = 50;  ///< steps for which there is a row of metrics; the last one of an epoch may be of fewer
  bool progress = true;         ///< a progress line on stderr
  std::string log_dir = {};     ///< for TensorBoard and log.jsonl; empty: neither

  std::function<void(const TrainerState&)> on_step = nullptr;
  std::function<void(const TrainerState&)> on_epoch = nullptr;

  /// How the ranks divide the training. Its group is the trainer's; null: the default group, and if there is none, this
  /// process trains alone. Strategies that divide the model (all but DataParallel and Zero1) save sharded checkpoints.
  Strategy strategy = strategy::DataParallel{};
};

namespace detail {

/// One batch, bound to the loss function.
struct TrainerBatch {
  std::function<torch::Tensor(Metrics&)> loss;  ///< null with a criterion
  torch::Tensor data, target;                   ///< with a criterion
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target, Metrics&)> criterion;
  std::function<std::vector<torch::Tensor>()> tensors;
  double samples = 1;
  bool is_last = false;  ///< of the pass
};

/// A model of any class, as the trainer uses it.
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
  std::function<torch::Tensor(torch::Tensor)> forward;  ///< null: it is not known, or not of one tensor
};

/// Data and loss of any types, as the trainer uses them.
struct TrainerData {
  std::function<void(std::size_t epoch)> set_epoch;
  std::function<std::size_t()> batches;  ///< of the pass that comes next; 0: not known
  /// A pass without its first `skip` batches, until `each` returns false. Without `look_ahead` no batch need be known
  /// as the last.
  std::function<void(std::size_t skip, bool look_ahead, const std::function<bool(const TrainerBatch&)>& each)> pass;
  std::function<std::string()> cursor;  ///< null: it has none, and the trainer counts batches
  std::function<void(const std::string&)> load_cursor;
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

/// The samples of a batch: the first dimension of its data, or of its first tensor.
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
        if constexpr (!std::forward_iterator<decltype(next)>) batch = with_own_tensors(batch);  // ++ may fill them anew
        ++next;
        if (!each(trainer_batch(batch, loss, !(next != end)))) break;
      }
    };
  }
  return made;
}

}  // namespace detail

/// A loader of torch::data and the sampler that it was made with: data of a training that goes on in the middle of an
/// epoch. Both must outlive it.
template <class Loader>
class SampledData {
 public:
  SampledData(Loader& loader, DistributedSampler sampler) : loader_(&loader), sampler_(std::move(sampler)) {}

  void set_epoch(std::size_t epoch) { sampler_.set_epoch(epoch); }
  std::size_t batches() const {
    const auto& options = loader_->options();
    return options.drop_last ? sampler_.local_size() / options.batch_size : sampler_.local_batches(options.batch_size);
  }
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
  /// Collective over all ranks of the strategy, which get rank 0's parameters and buffers. The optimizer must outlive
  /// the trainer, and has the model's parameters. Throws InvalidArgument, before anything is changed, for a model or an
  /// optimizer that the strategy cannot train.
  template <std::derived_from<torch::nn::Module> Module>
  Trainer(const std::shared_ptr<Module>& model, torch::optim::Optimizer& optimizer, TrainerOptions options = {})
      : Trainer(detail::TrainerModel::of(model), optimizer, std::move(options)) {}
  template <class Module>
  Trainer(const torch::nn::ModuleHolder<Module>& model, torch::optim::Optimizer& optimizer, TrainerOptions options = {})
      : Trainer(detail::TrainerModel::of(model.ptr()), optimizer, std::move(options)) {}
  ~Trainer();  ///< waits for a checkpoint that is being written
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// More for the checkpoints: whatever Checkpoint::add takes. Before fit(); nothing happens where there are no
  /// checkpoints.
  template <class... Things>
  Trainer& add(const std::string& name, Things&&... things) {
    if (Checkpoint* kept = checkpoint()) kept->add(name, std::forward<Things>(things)...);
    return *this;
  }

  /// A GradScaler for float16: scales the loss, leaves out steps with gradients that are not finite (they count as
  /// steps), and is saved in checkpoints as "scaler". Before fit(); must outlive the trainer.
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

  /// Trains to the end that the options say. `loss(batch, metrics)` or `loss(batch)`: a tensor of one element, the mean
  /// over the batch; or a criterion() (strategy.h). Further metrics are named as the program likes, "loss" and
  /// "grad_norm" are the trainer's. Once it has ended by stop(), max_steps or a signal, another call goes on.
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

  /// The metrics of all batches of all ranks.
  template <class Data, class Loss>
  MetricRow evaluate(Data&& data, Loss&& loss, const SourceLocation& where = SourceLocation::current()) {
    return judge(detail::trainer_data(data, loss), where);
  }

  /// Asks fit() to end after this step: on any rank, from a hook.
  void stop() noexcept;

  const TrainerState& state() const noexcept;
  Checkpoint* checkpoint() noexcept;  ///< null: there are none
  detail::DdpBase* ddp() noexcept;    ///< null: this process trains alone, or the strategy has none
  /// The model as the strategy holds it, with the names that checkpoints have: for save_weights, full_parameters,
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
