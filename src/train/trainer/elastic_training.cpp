// Training in an elastic job (docs/elastic.md).
//
// When the group fails or the launcher forms another generation, all members make the next generation's world and
// compare how far they are. The survivors are at most one step apart, because a step needs all ranks. The most advanced
// one gives its state to ranks that are behind and to new ranks, in memory. Then all build their strategy, which
// divides the virtual ranks anew, and repeat the interrupted step.
#include "train/trainer/elastic_training.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/elastic.h"
#include "train/checkpoint/named_state.h"
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
  if (detached) join_next_generation({}, {});
  for (;;) {
    std::vector<int> lost;
    std::string reason = "the members of the job change";
    try {
      return train_to_the_end();
    } catch (const MembersChange&) {
    } catch (const Leaves&) {
      state.end = TrainerEnd::stopped;
      announce_leaving();
      group->abort(format_text("rank {} leaves the job", group->rank()));
      log_warning("Trainer: this process leaves the job after step {}; the other ranks go on", state.step);
      return;
    } catch (const Error& error) {
      if (!is_loss(error)) throw;
      lost = lost_in(error);
      reason = error.what();
    }
    join_next_generation(std::move(lost), std::move(reason));
  }
}

void Trainer::Impl::join_next_generation(std::vector<int> lost, std::string reason) {
  for (;;) {
    if (strategy) strategy->undo_step();
    if (log) log->end_epoch();
    const auto before = group ? group : get_default_group();
    group = next_generation(before, lost, reason);
    destroy_process_group();
    init_process_group(group);
    try {
      agree_on_state();
      detached = false;
      return;
    } catch (const Error& error) {
      if (!is_loss(error)) throw;
      lost = lost_in(error);
      reason = error.what();
    }
  }
}

void Trainer::Impl::agree_on_state() {
  MANIPLE_REQUIRE(
      group->rank() < options.virtual_ranks,
      "Trainer: the job has {} ranks now, and virtual_ranks is {}; give `maniple run --elastic` at most that "
      "many processes",
      group->size(), options.virtual_ranks);
  const std::string mine = format_text("{} {} {}", begun ? 1 : 0, state.step, static_cast<int>(stage));
  const auto all = group->all_gather_objects(mine, {}, public_place());
  std::tuple<int, std::int64_t, int> most{-1, 0, 0};
  int source = 0;
  bool has_new = false;
  for (int rank = 0; rank < group->size(); ++rank) {
    std::istringstream in(all[static_cast<std::size_t>(rank)]);
    std::tuple<int, std::int64_t, int> theirs;
    in >> std::get<0>(theirs) >> std::get<1>(theirs) >> std::get<2>(theirs);
    has_new = has_new || std::get<0>(theirs) == 0;
    if (theirs > most) {
      most = theirs;
      source = rank;
    }
  }
  const bool any_has_state = std::get<0>(most) == 1;
  const bool alike = std::all_of(all.begin(), all.end(), [&](const std::string& text) { return text == all[0]; });
  if (any_has_state && !alike) {
    checkpoint->use_group(group);
    checkpoint->copy_from(source, SourceLocation());
    const std::string text =
        group->broadcast_object(group->rank() == source ? progress_text() : std::string(), source, {}, public_place());
    if (group->rank() != source) load_progress(text);
    const auto hashes = group->all_gather_objects(hash_of(*model.module), {}, public_place());
    const auto own = static_cast<std::size_t>(group->rank());
    if (hashes[own] != hashes[static_cast<std::size_t>(source)]) {
      throw ProtocolError(
          format_text("Trainer: rank {} got the state of step {} from rank {}, and its weights have another hash",
                      group->rank(), state.step, source));
    }
  }
  if (group->rank() == source)
    log_debug("Trainer: generation of {} ranks continues after step {}", group->size(), state.step);
  if (any_has_state) begun = true;
  rebuild();
  if (!has_new) strategy->assume_same_bits();
  if (any_has_state) return;
  begin();  // all processes are new: from the checkpoint, if there is one
  rows_step = state.step;
}

/// Builds everything that depends on the group.
void Trainer::Impl::rebuild() {
  if (strategy) {
    bits = strategy->bits_text();
    accumulation.reset();
    strategy.reset();
  }
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
                                     cursor,
                                     text_of(state.train),
                                     text_of(state.evaluation)};
  for (const Metrics& part : metrics) fields.push_back(part.state_dict());
  return packed(fields);
}

void Trainer::Impl::load_progress(const std::string& text) {
  const std::vector<std::string> fields = unpacked(text);
  constexpr std::size_t kFixed = 6;
  if (fields.size() != kFixed + metrics.size())
    throw ProtocolError("Trainer: another rank sent the progress of another training");
  stage = static_cast<Stage>(std::stoi(fields[0]));
  state.end = static_cast<TrainerEnd>(std::stoi(fields[1]));
  rows_step = std::stoll(fields[2]);
  cursor = fields[3];
  state.train = row_of(fields[4]);
  state.evaluation = row_of(fields[5]);
  for (std::size_t i = 0; i < metrics.size(); ++i) metrics[i].load_state_dict(fields[kFixed + i]);
}

}  // namespace maniple
