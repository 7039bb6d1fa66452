// Training in an elastic job (docs/elastic.md).
//
// When the group fails or the launcher forms another generation, all members make the next generation's world and
// compare how far they are. The survivors are at most one step apart, because a step needs all ranks. The most advanced
// one gives its state to ranks that are behind and to new ranks, in memory. Then all build their strategy, which
// divides the virtual ranks anew, and repeat the interrupted step. A rank that would not train the same ends, and the
// others go on without it.
#include "train/trainer/elastic_training.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/elastic.h"
#include "train/checkpoint/named_state.h"
#include "train/data/cursor_text.h"
#include "train/sha256.h"
#include "train/tensor/public_call.h"
#include "train/trainer/trainer_impl.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

/// Whether the members of the next generation can go on after this error.
bool is_loss(const Error& error) {
  return error.kind() == ErrorKind::peer_lost || error.kind() == ErrorKind::aborted ||
         error.kind() == ErrorKind::timeout;
}

/// The ranks that the error blames. (An abort blames none: its cause is known elsewhere.)
std::vector<int> lost_in(const Error& error) {
  return error.kind() == ErrorKind::aborted ? std::vector<int>() : error.info().ranks;
}

std::string packed(const std::vector<std::string>& fields) {
  std::string all;
  for (const std::string& field : fields) all += format_text("{} {}", field.size(), field);
  return all;
}

std::vector<std::string> unpacked(const std::string& all) {
  std::vector<std::string> fields;
  std::istringstream in(all);
  for (std::size_t size = 0; in >> size;) {
    in.get();
    std::string& field = fields.emplace_back(size, ' ');
    in.read(field.data(), static_cast<std::streamsize>(size));
  }
  return fields;
}

std::string text_of(const MetricRow& row) {
  std::vector<std::string> fields;
  for (const Metric& metric : row) {
    fields.insert(fields.end(), {metric.name, std::to_string(static_cast<int>(metric.kind)),
                                 maniple::text_of(metric.value), maniple::text_of(metric.count)});
  }
  return packed(fields);
}

MetricRow row_of(const std::string& text) {
  const std::vector<std::string> fields = unpacked(text);
  std::vector<Metric> metrics;
  for (std::size_t i = 0; i + 3 < fields.size(); i += 4) {
    metrics.push_back(
        {fields[i], static_cast<MetricKind>(std::stoi(fields[i + 1])), real_of(fields[i + 2]), real_of(fields[i + 3])});
  }
  return MetricRow(std::move(metrics));
}

/// What a member reports to the others when a generation has met.
struct Position {
  int begun = 0;  ///< whether it has a state of the training
  std::int64_t step = 0;
  int stage = 0;
  int proven = 0;             ///< whether its bits have been compared with the others'
  std::string same_job = {};  ///< Trainer::Impl::same_job_text()

  auto progress() const { return std::tie(begun, step, stage); }
  std::string text() const { return format_text("{} {} {} {}\n{}", begun, step, stage, proven, same_job); }
  static Position of(const std::string& text) {
    Position position;
    std::istringstream in(text);
    in >> position.begun >> position.step >> position.stage >> position.proven;
    position.same_job = text.substr(text.find('\n') + 1);
    return position;
  }
};

/// The first line that differs, as "THERE, and HERE".
std::string difference(const std::string& theirs, const std::string& own) {
  std::istringstream there(theirs), here(own);
  for (std::string one, other;;) {
    const bool more = static_cast<bool>(std::getline(there, one)),
               own_more = static_cast<bool>(std::getline(here, other));
    if (!more && !own_more) return "";
    if (!more) one = "nothing more";
    if (!own_more) other = "nothing more";
    if (one != other) return format_text("{}, and this rank {}", one, other);
  }
}

std::string described(const char* what, const detail::TrainerData& data) {
  const auto cursor = data.cursor ? read_cursor(data.cursor()) : std::nullopt;
  if (!cursor) return "";
  return format_text("{} data of {} samples, shuffle {}, seed {}\n", what, cursor->size, cursor->shuffle ? 1 : 0,
                     cursor->shuffle ? cursor->seed : 0);
}

std::string hash_of(torch::nn::Module& module) {
  Sha256 hash;
  std::vector<torch::Tensor> tensors = module.parameters();
  for (const torch::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const torch::Tensor& tensor : tensors) {
    const torch::Tensor bytes = tensor.detach().contiguous();
    hash.add(bytes.data_ptr(), bytes.nbytes());
  }
  return hash.take();
}

}  // namespace

bool Trainer::Impl::is_elastic_job() const {
  return options.virtual_ranks > 0 && maniple::is_elastic() && is_initialized();
}

void Trainer::Impl::train_among_changes() {
  bool joins = detached;
  std::vector<int> lost;
  std::string reason = "the job has more ranks than virtual ranks";
  for (;;) {
    try {
      if (joins) {
        join_next_generation(std::exchange(lost, {}), std::exchange(reason, "the members of the job change"));
      } else if (!begun) {
        begin_together();
      } else {
        begin();
      }
      train_to_the_end();
      return wait_for_checkpoints();
    } catch (const MembersChange&) {
      reason = "the members of the job change";
    } catch (const Leaves& leaves) {
      state.end = TrainerEnd::stopped;
      announce_leaving();
      get_default_group()->abort(format_text("rank {} leaves the job", get_default_group()->rank()));
      log_warning("Trainer: {}; the other ranks go on", leaves.why);
      return;
    } catch (const Error& error) {
      if (launcher_ends() || (!is_loss(error) && !failed_elsewhere(error))) throw;
      lost = lost_in(error);
      reason = error.what();
    }
    joins = true;
  }
}

/// Whether a rank that had not trained with the others before has failed. It ends with its own error.
bool Trainer::Impl::failed_elsewhere(const Error& error) const {
  const int origin = error.info().origin;
  return group && origin != group->rank() && newcomers.count(origin) != 0;
}

void Trainer::Impl::join_next_generation(std::vector<int> lost, std::string reason) {
  for (;;) {
    if (strategy) strategy->undo_step();
    if (log) log->end_epoch();
    const auto before = group ? group : get_default_group();
    if (!is_detached(*before) && before->rank() >= options.virtual_ranks) {
      throw Leaves{
          format_text("this process leaves the job, which has {} ranks: with virtual_ranks {} rank {} has nothing to "
                      "compute. Give `maniple run --elastic` at most {} processes",
                      before->size(), options.virtual_ranks, before->rank(), options.virtual_ranks)};
    }
    group = next_generation(before, lost, reason);
    destroy_process_group();
    init_process_group(group);
    try {
      agree_on_state();
      detached = false;
      return;
    } catch (const Error& error) {
      if (!is_loss(error) && !failed_elsewhere(error)) throw;
      lost = lost_in(error);
      reason = error.what();
    }
  }
}

/// What all ranks must have in common; one fact per line.
std::string Trainer::Impl::same_job_text() const {
  std::string text = format_text(
      "virtual_ranks {}\nvirtual_threads {}\nallow_different_bits {}\nepochs {}\nmax_steps {}\nmax_grad_norm {}\n"
      "nonfinite_gradients {}\nsave_every {}\nevaluate_every {}\nmonitor {}\nmode {}\npatience {}\nmin_delta {}\n"
      "graceful_stop {}\nlog_every {}\na checkpoint folder: {}\n",
      options.virtual_ranks, options.virtual_threads, options.allow_different_bits ? 1 : 0, options.epochs,
      options.max_steps, options.max_grad_norm, static_cast<int>(options.nonfinite_gradients), options.save_every,
      options.evaluate_every, options.monitor, options.mode == StopMode::min ? "min" : "max", options.patience,
      options.min_delta, options.graceful_stop ? 1 : 0, options.log_every,
      options.checkpoint.folder.empty() ? "none" : "given");
  text += described("training", *train);
  text += evaluation == nullptr ? "no evaluation data\n" : described("evaluation", *evaluation);
  const auto add = [&](const char* what, const auto& items) {
    for (const auto& item : items) {
      text += format_text("{} {}: {} [{}]\n", what, item.key(), c10::toString(item.value().scalar_type()),
                          joined(item.value().sizes(), ", "));
    }
  };
  add("parameter", model.module->named_parameters());
  add("buffer", model.module->named_buffers());
  return text;
}

void Trainer::Impl::agree_on_state() {
  newcomers.clear();
  received.clear();  // of a transfer that was interrupted
  // Ranks without a virtual rank leave (join_next_generation), and the others meet again.
  if (group->size() > options.virtual_ranks) throw Aborted("the job has more ranks than virtual ranks");
  const Position own{.begun = begun ? 1 : 0,
                     .step = state.step,
                     .stage = static_cast<int>(stage),
                     .proven = proven ? 1 : 0,
                     .same_job = same_job_text()};
  std::vector<Position> all;
  for (const std::string& text : group->all_gather_objects(own.text(), {}, public_place()))
    all.push_back(Position::of(text));
  const auto most = std::max_element(all.begin(), all.end(),
                                     [](const Position& a, const Position& b) { return a.progress() < b.progress(); });
  const auto source = static_cast<int>(most - all.begin());
  const bool any_has_state = most->begun == 1;
  bool alike = true, all_proven = true;
  for (int rank = 0; rank < group->size(); ++rank) {
    const Position& position = all[static_cast<std::size_t>(rank)];
    if (position.begun == 0) newcomers.insert(group->topology().members[static_cast<std::size_t>(rank)].global_rank);
    alike = alike && position.progress() == most->progress();
    all_proven = all_proven && position.proven == 1;
  }
  if (own.same_job != most->same_job) {
    throw InvalidArgument(
        format_text("Trainer: rank {} has {}; all processes of an elastic job run the same program with the same "
                    "options, and this one ends",
                    source, difference(most->same_job, own.same_job)));
  }
  for (const Position& position : all) {
    if (position.same_job != own.same_job) throw Aborted("a process of the job has other options, and ends");
  }
  bits = bits_text();
  if (any_has_state && !alike) {
    checkpoint->use_group(group);
    // Applied together with the parts (load_state): nobody continues with a part of a state.
    received =
        group->broadcast_object(group->rank() == source ? progress_text() : std::string(), source, {}, public_place());
    checkpoint->copy_from(source, SourceLocation());
    received.clear();
    const auto hashes = group->all_gather_objects(hash_of(*model.module), {}, public_place());
    if (hashes[static_cast<std::size_t>(group->rank())] != hashes[static_cast<std::size_t>(source)]) {
      throw ProtocolError(
          format_text("Trainer: rank {} got the state of step {} from rank {}, and its weights have another hash",
                      group->rank(), state.step, source));
    }
    bits = bits_text();
  }
  if (!any_has_state) bits = group->broadcast_object(bits, 0, {}, public_place());  // its seed
  if (group->rank() == source)
    log_debug("Trainer: generation of {} ranks continues after step {}", group->size(), state.step);
  rebuild();
  if (all_proven) strategy->assume_same_bits();
  if (!any_has_state) return begin_together();
  // A rank that was lost may have been writing.
  if (saved_step == state.step) save();
  if (!best || best_step != state.step) return;
  best->save(state.step, {});
  best->wait();
}

/// All processes are new: they begin with the checkpoint, if there is one.
void Trainer::Impl::begin_together() {
  const std::string resumed = begin();
  rows_step = state.step;
  if (!resumed.empty()) log.emplace(options, log_rank, true, state, resumed);
}

/// No rank returns before the checkpoints are complete: if the rank that writes them is lost, the others save again.
void Trainer::Impl::wait_for_checkpoints() {
  if (!checkpoint || options.checkpoint.folder.empty()) return;
  checkpoint->wait();
  best->wait();
  if (group && group->size() > 1) group->barrier({}, public_place());
}

/// Builds everything that depends on the group.
void Trainer::Impl::rebuild() {
  accumulation.reset();
  strategy.reset();
  strategy = made_strategy(model, optimizer, options);
  strategy->load_bits_text(bits);
  accumulation.emplace(strategy->accumulation(options.accumulate));
  step_parts.assign(static_cast<std::size_t>(strategy->virtual_ranks()->count), {});
  EarlyStopping stopping(stopping_options());
  stopping.load_state_dict(best_so_far.state_dict());
  best_so_far = std::move(stopping);
  if (checkpoint) checkpoint->use_group(group);
  if (best) best->use_group(group);
  if (group->rank() != log_rank) {
    log_rank = group->rank();
    log.emplace(options, log_rank, true, state, std::string());
  }
  if (!last_row.empty()) log->write_again(last_row);
  for (const detail::TrainerData* data : {train, evaluation}) {
    if (data != nullptr) strategy->require_usable(*data);
  }
  if (!cursor.empty()) train->load_cursor(cursor);
}

/// What checkpoints do not hold.
std::string Trainer::Impl::progress_text() const {
  std::vector<std::string> fields = {std::to_string(static_cast<int>(stage)),
                                     std::to_string(static_cast<int>(state.end)),
                                     std::to_string(rows_step),
                                     std::to_string(saved_step),
                                     std::to_string(best_step),
                                     cursor,
                                     last_row,
                                     text_of(state.train),
                                     text_of(state.evaluation)};
  for (const Metrics& part : metrics) fields.push_back(part.state_dict());
  return packed(fields);
}

void Trainer::Impl::load_progress(const std::string& text) {
  const std::vector<std::string> fields = unpacked(text);
  constexpr std::size_t kFixed = 9;
  if (fields.size() != kFixed + metrics.size())
    throw ProtocolError("Trainer: another rank sent the progress of another training");
  stage = static_cast<Stage>(std::stoi(fields[0]));
  state.end = static_cast<TrainerEnd>(std::stoi(fields[1]));
  rows_step = std::stoll(fields[2]);
  saved_step = std::stoll(fields[3]);
  best_step = std::stoll(fields[4]);
  cursor = fields[5];
  last_row = fields[6];
  state.train = row_of(fields[7]);
  state.evaluation = row_of(fields[8]);
  for (std::size_t i = 0; i < metrics.size(); ++i) metrics[i].load_state_dict(fields[kFixed + i]);
  begun = true;
}

}  // namespace maniple
