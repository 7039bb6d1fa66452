#include "train/trainer/virtual_ranks.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/elastic.h"
#include "train/data/split_mix.h"
#include "train/ddp/reducer.h"
#include "train/open_blas.h"
#include "train/restored.h"
#include "train/sha256.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>

namespace maniple::trainer {
namespace {

/// LibTorch computes with this number of threads during the lifetime of the object.
class JobThreads {
 public:
  explicit JobThreads(int threads) : before_(at::get_num_threads()) {
    at::set_num_threads(threads);
    if (open_blas().has_threads()) {
      blas_before_ = open_blas().get();
      open_blas().set(threads);
    }
    const int now = at::get_num_threads();
    if (now == threads) return;
    restore();
    throw InvalidArgument(
        format_text("Trainer: virtual_threads is {}, but this LibTorch stays at {} threads per operation; set "
                    "virtual_threads to {}",
                    threads, now, now));
  }
  ~JobThreads() { restore(); }
  JobThreads(const JobThreads&) = delete;
  JobThreads& operator=(const JobThreads&) = delete;

 private:
  void restore() const {
    at::set_num_threads(before_);
    if (blas_before_ > 0) open_blas().set(blas_before_);
  }
  int before_, blas_before_ = 0;
};

/// Whether this thread rounds numbers below 1.2e-38 to zero.
bool flushes_denormals() {
  volatile float smallest = 1.17549435e-38F;
  const volatile float half = smallest * 0.5F;
  return half == 0;
}

/// The value of a line "NAME: VALUE" or "- NAME: VALUE" of LibTorch's description of itself.
std::string configured(const std::string& name) {
  const std::string all = at::show_config();
  const std::size_t at = all.find(name + ": ");
  if (at == std::string::npos) return "unknown";
  const std::size_t begin = at + name.size() + 2;
  return all.substr(begin, all.find('\n', begin) - begin);
}

std::string hash_of(const std::vector<torch::Tensor>& tensors) {
  Sha256 hash;
  for (const torch::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const torch::Tensor bytes = tensor.detach().contiguous();
    hash.add(bytes.data_ptr(), bytes.nbytes());
  }
  return hash.take();
}

/// The tensors of a batch have other contents during the lifetime of the object.
class Replaced {
 public:
  Replaced(std::vector<torch::Tensor> tensors, const std::vector<torch::Tensor>& by) : tensors_(std::move(tensors)) {
    for (const torch::Tensor& tensor : tensors_) own_.push_back(tensor.defined() ? tensor.detach() : tensor);
    set(by);
  }
  ~Replaced() { set(own_); }
  Replaced(const Replaced&) = delete;
  Replaced& operator=(const Replaced&) = delete;

 private:
  void set(const std::vector<torch::Tensor>& by) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].defined()) tensors_[i].set_data(by[i]);
    }
  }
  std::vector<torch::Tensor> tensors_, own_;
};

/// Rank 0's tensors, on all ranks.
std::vector<torch::Tensor> from_first(const std::vector<torch::Tensor>& tensors, ProcessGroup& group) {
  std::ostringstream out;
  if (group.rank() == 0) {
    std::vector<torch::Tensor> defined;
    for (const torch::Tensor& tensor : tensors) defined.push_back(tensor.defined() ? tensor : torch::zeros({0}));
    torch::save(defined, out);
  }
  std::istringstream in(group.broadcast_object(out.str(), 0, {}, public_place()));
  std::vector<torch::Tensor> all;
  torch::load(all, in);
  return all;
}

constexpr std::uint64_t kTraining = 0, kEvaluation = 1, kProbe = 2;

}  // namespace

VirtualRanksStrategy::VirtualRanksStrategy(Given given, const std::shared_ptr<ProcessGroup>& group,
                                           const DdpOptions& ddp, const TrainerOptions& options)
    : TrainerStrategy(std::move(given), group, group, ddp),
      own_(VirtualRanks::of(options.virtual_ranks, group ? group->rank() : 0, group ? group->size() : 1)),
      threads_(options.virtual_threads),
      allow_different_bits_(options.allow_different_bits),
      seed_(static_cast<std::int64_t>(at::detail::getDefaultCPUGenerator().current_seed())),
      replicated_(group, {}),
      sums_(own_.total, own_.first) {
  if (ddp_) ddp_->reducer()->use_virtual_ranks(own_.total);
  if (group && group->size() > 1) group->broadcast(buffer_of(seed_), 0, {}, public_place());
  if (ddp_) return;
  for (const torch::Tensor& parameter : detail::distinct(module().parameters())) {
    if (parameter.requires_grad()) parameters_.push_back(parameter);
  }
}
VirtualRanksStrategy::~VirtualRanksStrategy() = default;

std::shared_ptr<void> VirtualRanksStrategy::begin() { return std::make_shared<JobThreads>(threads_); }

void VirtualRanksStrategy::require_usable(const detail::TrainerData& data) const {
  TrainerStrategy::require_usable(data);
  MANIPLE_REQUIRE(data.divide,
                  "Trainer: virtual_ranks needs data that can be divided over {} virtual ranks: a DataLoader, "
                  "maniple::sampled(loader, sampler), or a class with divide(const VirtualRanks&)",
                  own_.total);
  data.divide(own_);
}

/// A step of this rank consists of one batch for each of its virtual ranks.
Accumulation VirtualRanksStrategy::accumulation(int) { return TrainerStrategy::accumulation(own_.count); }

void VirtualRanksStrategy::seed(std::uint64_t kind, std::int64_t step, int virtual_rank) const {
  const auto place = mixed(mixed(static_cast<std::uint64_t>(seed_) + SplitMix::kStep * (kind + 1)) +
                           static_cast<std::uint64_t>(step) + 1);
  torch::manual_seed(mixed(place + static_cast<std::uint64_t>(virtual_rank) + 1));
}

// ---- A step ---------------------------------------------------------------------------------------------------------

void VirtualRanksStrategy::begin_step() {
  // With one turn only an interrupted step needs them.
  buffers_before_ = own_.count > 1 || is_elastic() ? TensorValues(buffers()) : TensorValues();
  buffers_after_ = TensorValues();
  sums_.clear();
  used_.assign(parameters_.size(), false);
  if (ddp_) ddp_->reducer()->drop_kept();
}

void VirtualRanksStrategy::undo_step() {
  buffers_before_.restore();
  buffers_before_ = TensorValues();
  drop_gradients();
}

void VirtualRanksStrategy::begin_batch(std::int64_t step, int turn) {
  turn_ = turn;
  const bool trains = torch::GradMode::is_enabled();
  if (trains && turn > 0) buffers_before_.restore();
  seed(trains ? kTraining : kEvaluation, step, own_.first + turn);
}

torch::Tensor VirtualRanksStrategy::backward(const detail::TrainerBatch& batch, Metrics& metrics,
                                             const Scaled& scaled) {
  MANIPLE_REQUIRE(!batch.is_last || turn_ + 1 == own_.count,
                  "Trainer: the data ends with a batch of virtual rank {}, and virtual ranks {} to {} have none; with "
                  "virtual_ranks training data needs SamplerMode::training",
                  own_.first + turn_, own_.first + turn_ + 1, own_.first + own_.count - 1);
  return TrainerStrategy::backward(batch, metrics, scaled);
}

void VirtualRanksStrategy::end_batch() {
  if (own_.first + turn_ == 0 && own_.count > 1) buffers_after_ = TensorValues(buffers());
  if (ddp_) {
    if (turn_ + 1 < own_.count) ddp_->reducer()->keep_gradients();
    return;
  }
  std::vector<torch::Tensor> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    used_[i] = used_[i] || parameters_[i].grad().defined();
    gradients.push_back(VirtualSums::taken_from(parameters_[i]));
  }
  sums_.append(std::move(gradients));
}

void VirtualRanksStrategy::finish_backward() {
  if (!ddp_) {
    MANIPLE_ASSERT(sums_.sums().size() == 1);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (used_[i]) parameters_[i].mutable_grad() = sums_.sums()[0][i].div_(own_.total);
    }
    sums_.clear();
  }
  buffers_after_.restore();
  const std::vector<torch::Tensor> now = buffers();
  if (!ddp_ || now.empty()) return;
  if (!replicated_.replace(now)) replicated_ = Replicator(world(), now);
  replicated_.copy_from(0);
}

// Computes a batch of this rank again, and leaves the buffers as they are.
std::string VirtualRanksStrategy::nonfinite_in(const detail::TrainerBatch& batch) {
  const Restored unchanged{TensorValues(buffers())};
  const std::string text = TrainerStrategy::nonfinite_in(batch);
  if (ddp_) ddp_->reducer()->drop_kept();
  return text;
}

// ---- Whether ranks compute the same bits ----------------------------------------------------------------------------

VirtualRanksStrategy::Facts VirtualRanksStrategy::facts() const {
  return {{"virtual_ranks", std::to_string(own_.total)},
          {"virtual_threads", std::to_string(threads_)},
          {"LibTorch", TORCH_VERSION},
          {"the CPU capability", configured("CPU capability usage")},
          {"oneDNN", at::globalContext().userEnabledMkldnn() ? at::get_mkldnn_version() : "off"},
          {"OpenBLAS's kernels", open_blas().core != nullptr ? open_blas().core() : "none"},
          {"flush_denormals", flushes_denormals() ? "on" : "off"}};
}

/// One line per fact; the seed is taken over instead of compared.
std::string VirtualRanksStrategy::bits_text() const {
  std::string text = format_text("seed={}\n", seed_);
  for (const auto& [name, value] : facts()) {
    std::string line = value;
    std::replace(line.begin(), line.end(), '\n', ' ');
    text += format_text("{}={}\n", name, line);
  }
  return text;
}

void VirtualRanksStrategy::load_bits_text(const std::string& text) {
  std::istringstream lines(text);
  Facts saved;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t end = line.find('=');
    if (end != std::string::npos) saved[line.substr(0, end)] = line.substr(end + 1);
  }
  if (saved.empty()) return;  // saved by a training without virtual ranks
  for (const auto& [name, value] : facts()) {
    const auto found = saved.find(name);
    if (found == saved.end() || found->second == value) continue;
    differ(format_text("the checkpoint was saved with {} {}, and here it is {}", name, found->second, value));
  }
  if (const auto found = saved.find("seed"); found != saved.end()) seed_ = std::stoll(found->second);
}

void VirtualRanksStrategy::differ(const std::string& what) {
  MANIPLE_REQUIRE(
      allow_different_bits_,
      "Trainer: {}: the results would not be the same bits on every number of ranks; remove the difference, "
      "or set TrainerOptions::allow_different_bits",
      what);
  if (std::exchange(warned_, true) || (world() && world()->rank() != 0)) return;
  log_warning("Trainer: {}; allow_different_bits is set, so the results may have different bits from now on", what);
}

/// The hash of the gradients that this rank computes from a batch.
std::string VirtualRanksStrategy::probe(const detail::TrainerBatch& batch) {
  const Restored unchanged{TensorValues(buffers())};
  drop_gradients();
  seed(kProbe, 0, 0);
  const NoSync unsynced(ddp_->reducer());
  Metrics unused;
  loss_of(batch, unused).backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : module().parameters()) gradients.push_back(parameter.grad());
  drop_gradients();
  ddp_->reducer()->drop_kept();
  return hash_of(gradients);
}

void VirtualRanksStrategy::verify_bits(const detail::TrainerBatch& batch) {
  if (verified_ || !world() || world()->size() == 1) return;
  ProcessGroup& group = *world();
  const auto require_equal = [&](const std::string& mine, const auto& describe) {
    const auto all = group.all_gather_objects(mine, {}, public_place());
    if (is_elastic() && mine == all[0]) return;  // the others leave, and this rank goes on without them
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank] != all[0]) return differ(describe(rank, all[0], all[rank]));
    }
  };
  for (const auto& [name, value] : facts()) {
    require_equal(value, [&name = name](std::size_t rank, const std::string& first, const std::string& other) {
      return format_text("{} is {} on rank 0 and {} on rank {}", name, first, other, rank);
    });
  }
  const std::vector<torch::Tensor> own = batch.tensors();
  const std::vector<torch::Tensor> first = from_first(own, group);
  std::string hash = format_text("{} tensors", own.size());
  if (first.size() == own.size()) {
    const Replaced as_first(own, first);
    hash = probe(batch);
  }
  require_equal(hash, [](std::size_t rank, const std::string&, const std::string&) {
    return format_text(
        "from the same batch, ranks 0 and {} computed different gradients (other processors or libraries, a loss that "
        "depends on the rank, or batches of another form)",
        rank);
  });
  verified_ = true;  // not if it threw: the next call verifies again
}

namespace {

/// Throws InvalidArgument, on all ranks alike, unless they are processes with the same options. Collective.
void require_same_job(ProcessGroup& group, const TrainerOptions& options) {
  const auto& members = group.topology().members;
  for (std::size_t r = 0; r < members.size(); ++r) {
    for (std::size_t other = 0; other < r; ++other) {
      MANIPLE_REQUIRE(members[r].node_rank != members[other].node_rank || members[r].pid != members[other].pid,
                      "Trainer: virtual_ranks needs a process for each rank, and ranks {} and {} are threads of one "
                      "process, which share LibTorch's random generator",
                      other, r);
    }
  }
  const auto all = group.all_gather_objects(
      format_text("virtual_ranks {}, virtual_threads {}, allow_different_bits {}", options.virtual_ranks,
                  options.virtual_threads, options.allow_different_bits ? 1 : 0),
      {}, public_place());
  const std::string& own = all[static_cast<std::size_t>(group.rank())];
  if (is_elastic() && own == all[0]) return;  // the others leave, and this rank goes on without them
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    MANIPLE_REQUIRE(all[rank] == all[0],
                    "Trainer: rank 0 was given {}, and rank {} {}; all ranks pass the same options", all[0], rank,
                    all[rank]);
  }
}

}  // namespace

std::unique_ptr<TrainerStrategy> make_over_virtual_ranks(const TrainerOptions& options, TrainerStrategy::Given given) {
  MANIPLE_REQUIRE(options.virtual_ranks > 0, "Trainer: virtual_ranks is {}; expected 0 (off) or more",
                  options.virtual_ranks);
  MANIPLE_REQUIRE(options.virtual_threads >= 1, "Trainer: virtual_threads is {}; expected at least 1",
                  options.virtual_threads);
  MANIPLE_REQUIRE(
      options.accumulate == 1,
      "Trainer: accumulate is {}, and virtual_ranks accumulates by itself: a step has one batch for each of "
      "{} virtual ranks; leave accumulate at 1, or take more virtual ranks",
      options.accumulate, options.virtual_ranks);
  const auto* const choice = std::get_if<strategy::DataParallel>(&options.strategy);
  MANIPLE_REQUIRE(choice != nullptr, "Trainer: virtual_ranks needs strategy DataParallel; the others divide the model");
  require_undivided("DataParallel", *given.model.module);
  auto group = group_or_default(choice->ddp.group);
  MANIPLE_REQUIRE(!is_elastic() || !is_initialized() || group == get_default_group(),
                  "Trainer: in an elastic job (maniple run --elastic) leave DdpOptions::group empty: the default group "
                  "is replaced when members change");
  // Joins in fit(), or leaves, if the job has more ranks than it can use.
  if (group && is_elastic() && (is_detached(*group) || group->size() > options.virtual_ranks)) group = nullptr;
  // All refusals before DistributedDataParallel copies rank 0's parameters.
  VirtualRanks::of(options.virtual_ranks, group ? group->rank() : 0, group ? group->size() : 1);
  MANIPLE_REQUIRE(
      !flushes_denormals(),
      "Trainer: virtual_ranks cannot be combined with flush_denormals, which LibTorch applies to some threads "
      "only");
  for (const auto& item : given.model.module->named_parameters()) {
    MANIPLE_REQUIRE(item.value().is_cpu(), "Trainer: parameter {} is on {}; virtual ranks train on the CPU only",
                    item.key(), item.value().device().str());
  }
  MANIPLE_REQUIRE(choice->ddp.average == Average::ranks,
                  "Trainer: virtual_ranks cannot be combined with DdpOptions::average = Average::samples; all virtual "
                  "ranks have batches of the same size");
  MANIPLE_REQUIRE(
      !choice->ddp.static_graph,
      "Trainer: virtual_ranks cannot be combined with DdpOptions::static_graph; use find_unused_parameters");
  if (group && group->size() > 1) require_same_job(*group, options);
  DdpOptions ddp = choice->ddp;
  ddp.broadcast_buffers = false;  // finish_backward() does that
  return std::make_unique<VirtualRanksStrategy>(std::move(given), group, ddp, options);
}

}  // namespace maniple::trainer
