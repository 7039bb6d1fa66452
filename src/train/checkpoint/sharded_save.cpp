#include "train/checkpoint/sharded_save.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/checkpoint/safetensors.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

constexpr std::int64_t kPieceAlignment = 64;
constexpr std::int64_t kSamples = 64;
constexpr std::size_t kMaxReply = std::size_t{1} << 30;
/// One rank's disk may be slow; a lost rank is detected at once.
constexpr auto kLongestWrite = std::chrono::hours(2);

std::uint64_t mixed(std::uint64_t hash, std::string_view bytes) {  // FNV-1a
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}
constexpr std::uint64_t kHashSeed = 0xcbf29ce484222325;

/// A hash of a few elements, evenly spread. Replicas that have diverged, or that are not replicas, differ in nearly all
/// elements.
std::uint64_t fingerprint(const torch::Tensor& tensor) {
  const std::int64_t count = tensor.numel(), element = static_cast<std::int64_t>(tensor.element_size());
  std::uint64_t hash = kHashSeed;
  if (count == 0) return hash;
  const std::int64_t samples = std::min(count, kSamples);
  if (!tensor.is_cpu()) {
    const torch::Tensor flat = tensor.is_contiguous() ? tensor.view({-1}) : tensor.reshape({-1});
    const torch::Tensor some = flat.slice(0, 0, count, std::max<std::int64_t>(1, count / samples)).cpu().contiguous();
    return mixed(hash, {static_cast<const char*>(some.data_ptr()), some.nbytes()});
  }
  const auto* data = static_cast<const char*>(tensor.data_ptr());
  for (std::int64_t i = 0; i < samples; ++i) {
    std::int64_t rest = samples == 1 ? 0 : i * ((count - 1) / (samples - 1)), at = 0;
    for (std::int64_t d = tensor.dim(); d-- > 0;) {
      at += rest % tensor.size(d) * tensor.stride(d);
      rest /= tensor.size(d);
    }
    hash = mixed(hash, {data + at * element, static_cast<std::size_t>(element)});
  }
  return hash;
}

/// The elements of `box` in a tensor that holds the box `held`.
torch::Tensor narrowed(torch::Tensor tensor, const TensorBox& held, const TensorBox& box) {
  for (std::size_t d = 0; d < box.size.size(); ++d) {
    if (box.size[d] == held.size[d]) continue;
    tensor = tensor.narrow(static_cast<std::int64_t>(d), box.offset[d] - held.offset[d], box.size[d]);
  }
  return tensor;
}

void put_texts(ByteWriter& writer, const std::map<std::string, std::map<std::string, std::string>>& texts) {
  for (const auto& [part, entries] : texts) {
    for (const auto& [key, text] : entries) {
      for (const std::string* each : {&part, &key, &text}) writer.put_string(*each);
    }
  }
}

std::string encode_outcome(const ShardedSave::Outcome& outcome) {
  ByteWriter writer;
  writer.put(static_cast<std::uint8_t>(outcome.saved));
  writer.put_string(outcome.error);
  for (const std::string& note : outcome.notes) writer.put_string(note);
  return writer.take();
}

ShardedSave::Outcome decode_outcome(std::string_view bytes) {
  ByteReader reader(bytes);
  ShardedSave::Outcome outcome;
  outcome.saved = reader.get<std::uint8_t>() != 0;
  outcome.error = reader.get_string(kMaxReply);
  while (reader.left() > 0) outcome.notes.emplace_back(reader.get_string(kMaxReply));
  return outcome;
}

}  // namespace

void ShardedSave::prepare(const std::shared_ptr<ProcessGroup>& ranks, const std::function<PartStates()>& collect) {
  const bool alone = !ranks || ranks->size() == 1;
  PartStates states;
  std::vector<HeldBox> held;
  std::vector<torch::Tensor> tensors;
  std::string layout;
  std::exception_ptr failure;
  try {
    states = collect();
    for (const auto& [part, state] : states) {
      for (const PartState::Tensor& tensor : state.tensors) {
        const TensorShard& shard = tensor.shard;
        held.push_back({part, shard.name, {}, shard.shape, box_of(shard), tensor.of_lowest_rank});
        held.back().dtype = safetensors_dtype(shard.local.scalar_type());
        tensors.push_back(shard.local.detach());
      }
    }
    layout = encode_held(held);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  if (alone) {
    if (failure) std::rethrow_exception(failure);
    if (layout != layout_ || plan_.items.empty()) plan_ = make_save_plan({held});
  } else {
    std::int64_t agreed[2] = {layout != layout_ || plan_.items.empty() ? 1 : 0, failure ? ranks->rank() + 1 : 0};
    ranks->all_reduce(buffer_of(agreed), ReduceOp::max, {}, public_place());
    if (failure) std::rethrow_exception(failure);
    if (agreed[1] != 0) {
      throw_failed_on<InvalidArgument>(
          *ranks, static_cast<int>(agreed[1] - 1),
          format_text("rank {} could not save a checkpoint; its own error says why", agreed[1] - 1));
    }
    if (agreed[0] != 0) {
      std::vector<std::vector<HeldBox>> all;
      for (const std::string& each : ranks->all_gather_objects(layout, {}, public_place()))
        all.push_back(decode_held(each));
      layout_.clear();
      plan_ = {};
      plan_ = make_save_plan(all);
    }
    rank_ = ranks->rank();
    if (!background_) background_ = ranks->split(0, rank_, {.timeout = Seconds(kLongestWrite)}, {}, public_place());
    compare(*ranks, states, tensors);
  }
  layout_ = std::move(layout);
  own_texts_.clear();
  united_texts_.clear();
  for (auto& [part, state] : states)
    (state.kind == PartState::Texts::united ? united_texts_ : own_texts_)[part] = std::move(state.texts);
  // From here on other ranks rely on this rank: a failure is reported to them by write().
  error_.clear();
  try {
    copy(held, tensors);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
}

void ShardedSave::compare(ProcessGroup& ranks, const PartStates& states,
                          const std::vector<torch::Tensor>& tensors) const {
  ByteWriter mine;
  for (const auto& holders : plan_.replicas) {
    for (const SavePlan::Holder& holder : holders) {
      if (std::cmp_equal(holder.rank, rank_)) mine.put(fingerprint(tensors[holder.held]));
    }
  }
  for (const auto& [part, state] : states) {
    std::uint64_t hash = mixed(kHashSeed, part);
    if (state.kind == PartState::Texts::equal) {
      for (const auto& [key, text] : state.texts) hash = mixed(mixed(hash, key + "="), text + "\n");
    }
    mine.put(hash);
  }
  const std::vector<std::string> all = ranks.all_gather_objects(mine.bytes(), {}, public_place());
  std::vector<ByteReader> readers(all.begin(), all.end());
  for (const auto& holders : plan_.replicas) {
    std::optional<std::uint64_t> first;
    for (const SavePlan::Holder& holder : holders) {
      const auto hash = readers[holder.rank].get<std::uint64_t>();
      if (!first) first = hash;
      if (hash == *first) continue;
      const std::size_t at = &holders - plan_.replicas.data();
      throw InvalidArgument(format_text(
          "{} is not the same on ranks {} and {}, which both say that they hold it: weights that should be equal have "
          "diverged, or one name means different tensors (the stages of a pipeline need names of their own)",
          plan_.replica_names[at], holders.front().rank, holder.rank));
    }
  }
  for (std::size_t r = 1; r < readers.size(); ++r) {
    MANIPLE_REQUIRE(readers[r].left() == readers[0].left(), "ranks 0 and {} have added different parts to a checkpoint",
                    r);
  }
  for (const auto& [part, state] : states) {
    const auto first = readers[0].get<std::uint64_t>();
    for (std::size_t r = 1; r < readers.size(); ++r) {
      MANIPLE_REQUIRE(
          readers[r].get<std::uint64_t>() == first,
          "part \"{}\" of a checkpoint is another one on rank {} than on rank 0: other parameters, options or "
          "steps, or parts that were added in another order",
          part, r);
    }
  }
}

void ShardedSave::copy(const std::vector<HeldBox>& held, const std::vector<torch::Tensor>& tensors) {
  const torch::NoGradGuard no_grad;
  const auto& items = plan_.items[rank_];
  std::int64_t bytes = 0;
  bool of_device = false;
  std::vector<std::int64_t> places;
  SafetensorsHeader header;
  for (const SavePlan::Item& item : items) {
    const torch::Tensor& tensor = tensors[item.held];
    of_device = of_device || !tensor.is_cpu();
    places.push_back(bytes);
    const std::int64_t size = item.box.count() * static_cast<std::int64_t>(tensor.element_size());
    bytes += (size + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    header.entries.push_back({item.key, held[item.held].dtype, item.box.size});
  }
  place_safetensors(header);
  if (!memory_.defined() || memory_.numel() < bytes || (of_device && !memory_.is_pinned())) {
    memory_ = torch::Tensor();
    memory_ = torch::empty({bytes}, torch::TensorOptions().dtype(torch::kUInt8).pinned_memory(of_device));
  }
  pieces_.clear();
  auto* data = static_cast<char*>(memory_.data_ptr());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const torch::Tensor from = narrowed(tensors[items[i].held], held[items[i].held].box, items[i].box);
    char* to = data + places[i];
    if (from.is_cpu() && from.is_contiguous()) {
      std::memcpy(to, from.data_ptr(), from.nbytes());
    } else {
      torch::from_blob(to, from.sizes(), torch::TensorOptions().dtype(from.scalar_type())).copy_(from);
    }
    pieces_.push_back({std::move(header.entries[i]), to});
  }
}

/// Returns the reply for rank 0: 1, length, hash and texts; or 0 and the error text.
std::string ShardedSave::write_file(const std::string& path) const {
  ByteWriter reply;
  try {
    if (!error_.empty()) throw ProtocolError(error_);
    SafetensorsHeader header;
    for (const Piece& piece : pieces_) header.entries.push_back(piece.entry);
    DurableFile file(path);
    file.write(encode_safetensors(header));
    for (const Piece& piece : pieces_) file.write(piece.data, piece.entry.bytes());
    const FileDigest digest = file.finish();
    reply.put(std::uint8_t{1});
    reply.put(digest.bytes);
    reply.put_string(digest.sha256);
    put_texts(reply, united_texts_);
  } catch (const std::exception& error) {
    reply = {};
    reply.put(std::uint8_t{0});
    reply.put_string(error.what());
  }
  return reply.take();
}

/// On rank 0. `replies` come from ranks that have all written their files.
CheckpointIndex ShardedSave::index_with_texts(const std::vector<std::string>& replies) const {
  CheckpointIndex index = plan_.index;
  for (const auto& [part, texts] : own_texts_) index.parts[part].texts = texts;
  for (const auto& [part, texts] : united_texts_) index.parts[part];
  for (std::size_t r = 0; r < replies.size(); ++r) {
    ByteReader reader(replies[r]);
    reader.get<std::uint8_t>();
    reader.get<std::uint64_t>();
    reader.get_string(kMaxReply);
    while (reader.left() > 0) {
      const std::string part(reader.get_string(kMaxReply)), key(reader.get_string(kMaxReply));
      const std::string text(reader.get_string(kMaxReply));
      const std::string& kept = index.parts[part].texts.emplace(key, text).first->second;
      MANIPLE_REQUIRE(kept == text, "\"{}\" of part \"{}\" is \"{}\" on rank {}, and \"{}\" on one before it", key,
                      part, text, r, kept);
    }
  }
  return index;
}

ShardedSave::Outcome ShardedSave::write(const std::string& folder, std::int64_t step, int keep_last,
                                        std::optional<std::int64_t> loaded) {
  ProcessGroup* ranks = background_.get();
  Outcome outcome;
  std::optional<PendingCheckpoint> pending;
  std::string path;
  if (rank_ == 0) {
    try {
      pending.emplace(folder, step);
      path = pending->path_of("");
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
  }
  if (ranks != nullptr) path = ranks->broadcast_object(path, 0, {}, public_place());
  if (!path.empty()) {
    const std::string& name = plan_.index.files[rank_];
    const std::string reply = write_file(path + name);
    const auto replies = ranks == nullptr ? std::vector{reply} : ranks->gather_objects(reply, 0, {}, public_place());
    if (rank_ == 0) {
      try {
        for (std::size_t r = 0; r < replies.size(); ++r) {
          ByteReader reader(replies[r]);
          if (reader.get<std::uint8_t>() == 0) {
            const std::string text(reader.get_string(kMaxReply));
            outcome.error += format_text("{}rank {}: {}", outcome.error.empty() ? "" : "; ", r, text);
            continue;
          }
          const auto bytes = reader.get<std::uint64_t>();
          pending->add(plan_.index.files[r], {bytes, std::string(reader.get_string(kMaxReply))});
        }
        if (outcome.error.empty()) {
          const std::string index = encode_index(index_with_texts(replies));
          MANIPLE_REQUIRE(index.size() <= kMaxIndexBytes, "the index has {} bytes; at most {} can be read",
                          index.size(), kMaxIndexBytes);
          DurableFile file(pending->path_of(std::string(kIndexFile)));
          file.write(index);
          pending->add(std::string(kIndexFile), file.finish());
          outcome.notes = pending->commit(loaded);
          outcome.saved = true;
          for (std::string& note : prune_checkpoints(folder, keep_last, step)) outcome.notes.push_back(std::move(note));
        }
      } catch (const std::exception& error) {
        outcome.error = error.what();
      }
      pending.reset();  // removes a failed checkpoint before other ranks learn the outcome
    }
  }
  if (ranks != nullptr)
    outcome = decode_outcome(ranks->broadcast_object(encode_outcome(outcome), 0, {}, public_place()));
  return outcome;
}

}  // namespace maniple
