// The state of a ShardedOptimizer: the state of this rank's slices, and the whole state as the plain optimizer would
// have it.
#include "train/sharded_optimizer/sharded_state.h"

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "train/state_key.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

using torch::Tensor;

constexpr int kStateTag = 1 << 20;  // tags of the messages by which rank 0 gathers the state

std::string count_name(std::size_t group) { return StateKey{StateOwner::of_group(group), kParametersField}.text(); }
bool is_of_parameter(const std::string& name) { return StateKey::parse(name).owner.is_parameter(); }

}  // namespace

void ShardedOptimizerBase::Impl::require_current() {
  MANIPLE_REQUIRE(fresh().empty() && slices.size() == self.param_groups().size(),
                  "ShardedOptimizer: parameters were added to param_groups() that no step has seen yet; add them with "
                  "add_param_group of ShardedOptimizer");
}

NamedState ShardedOptimizerBase::Impl::local_state() {
  const NamedState own = state_of(*local);
  NamedState result;
  for (const auto& [name, text] : own.texts) {
    if (!is_of_parameter(name)) result.texts[name] = text;
  }
  for (std::size_t g = 0; g < slices.size(); ++g) {
    result.texts[count_name(g)] = text_of(static_cast<std::int64_t>(self.param_groups()[g].params().size()));
    for (std::size_t k = 0; k < slices[g].size(); ++k) {
      const std::string from = StateOwner::of_parameter(g, k).text();
      const StateOwner to = StateOwner::of_parameter(g, slices[g][k].index);
      for_each_field(own.texts, from, [&](const std::string& field, const std::string& text) {
        result.texts[StateKey{to, field}.text()] = text;
      });
      for_each_field(own.tensors, from, [&](const std::string& field, const Tensor& tensor) {
        result.tensors[StateKey{to, field}.text()] = tensor;
      });
    }
  }
  return result;
}

void ShardedOptimizerBase::Impl::sync_options() {
  for (std::size_t g = 0; g < slices.size(); ++g)
    local->param_groups()[g].set_options(self.param_groups()[g].options().clone());
}

std::vector<ShardOf> ShardedOptimizerBase::Impl::shards() {
  const NamedState state = local_state();
  std::vector<ShardOf> result;
  for (const auto& one : slices) {
    for (const ParameterSlice& slice : one) {
      const StateOwner owner = StateOwner::of_parameter(slice.group, slice.index);
      for_each_field(state.tensors, owner.text(), [&](const std::string& field, const Tensor& tensor) {
        result.push_back(
            {StateKey{owner, field}.text(), slice.parameter.sizes().vec(), slice.offset, slice.count, tensor});
      });
    }
  }
  return result;
}

template <class Tensors, class Value>
void ShardedOptimizerBase::Impl::restore_from(const std::map<std::string, std::string>& texts, const Tensors& tensors,
                                              const Value& value) {
  require_current();
  NamedState state;
  for (const auto& [name, text] : texts) {
    if (!is_of_parameter(name)) state.texts[name] = text;
  }
  for (std::size_t g = 0; g < slices.size(); ++g) {
    const auto saved = texts.find(count_name(g));
    const std::size_t here = self.param_groups()[g].params().size();
    MANIPLE_REQUIRE(saved != texts.end(),
                    "the checkpoint's optimizer has fewer than the {} parameter groups of this one", slices.size());
    MANIPLE_REQUIRE(static_cast<std::size_t>(integer_of(saved->second)) == here,
                    "group {} of the checkpoint's optimizer has {} parameters, here {}", g, saved->second, here);
    state.texts[count_name(g)] = text_of(static_cast<std::int64_t>(slices[g].size()));
    for (std::size_t k = 0; k < slices[g].size(); ++k) {
      const StateOwner to = StateOwner::of_parameter(g, k), from = StateOwner::of_parameter(g, slices[g][k].index);
      for_each_field(texts, from.text(), [&](const std::string& field, const std::string& text) {
        state.texts[StateKey{to, field}.text()] = text;
      });
      for_each_field(tensors, from.text(), [&](const std::string& field, const auto& entry) {
        state.tensors[StateKey{to, field}.text()] = value(StateKey{from, field}.text(), entry, slices[g][k]);
      });
    }
  }
  maniple::restore(*local, state);
  for (std::size_t g = 0; g < slices.size(); ++g)
    self.param_groups()[g].set_options(local->param_groups()[g].options().clone());
}

std::vector<ShardOf> ShardedOptimizerBase::shards() { return impl_->shards(); }

std::map<std::string, std::string> ShardedOptimizerBase::state_texts() {
  impl_->sync_options();
  return impl_->local_state().texts;
}

std::vector<ShardOf> ShardedOptimizerBase::begin_load(const std::map<std::string, std::string>& texts,
                                                      const std::set<std::string>& tensors) {
  std::map<std::string, bool> names;
  for (const std::string& name : tensors) names[name] = true;
  const bool masters = impl_->step_options.master_weights;
  impl_->restore_from(texts, names, [masters](const std::string&, bool, const ParameterSlice& slice) {
    const auto dtype = masters && slice.parameter.element_size() == 2 ? torch::kFloat32 : slice.parameter.scalar_type();
    return torch::zeros(slice.local.sizes(), slice.local.options().dtype(dtype));
  });
  return impl_->shards();
}

std::size_t ShardedOptimizerBase::state_bytes() {
  std::size_t bytes = 0;
  for (const ShardOf& shard : impl_->shards()) bytes += shard.local.nbytes();
  return bytes;
}

// ---- The whole state ------------------------------------------------------------------------------------------------

NamedState whole_state(ShardedOptimizerBase& optimizer) {
  const torch::NoGradGuard no_grad;
  auto& impl = optimizer.impl();
  impl.lay_out_fresh();
  impl.sync_options();
  ProcessGroup& group = impl.group();
  NamedState own = impl.local_state();
  const std::vector<ShardOf> shards = impl.shards();

  // Every rank lists what it holds; then rank 0 receives each part directly in its place.
  ByteWriter list;
  list.put(static_cast<std::uint64_t>(own.texts.size()));
  for (const auto& [name, text] : own.texts) list.put_string(name), list.put_string(text);
  list.put(static_cast<std::uint64_t>(shards.size()));
  for (const ShardOf& shard : shards) {
    list.put_string(shard.name);
    list.put(static_cast<std::int8_t>(shard.local.scalar_type()));
    list.put(static_cast<std::uint64_t>(shard.shape.size()));
    for (const std::int64_t size : shard.shape) list.put(size);
    list.put(shard.offset), list.put(shard.count);
  }
  const std::vector<std::string> lists = group.gather_objects(list.take(), 0, {}, public_place());
  NamedState result;
  if (group.rank() != 0) {
    for (const ShardOf& shard : shards) {
      const Tensor part = shard.local.cpu().contiguous();
      group.send(ConstBuffer{part.data_ptr(), part.nbytes(), DType::uint8}, 0, kStateTag, {}, public_place());
    }
    for (auto& [name, text] : own.texts) {
      if (!is_of_parameter(name)) result.texts[name] = std::move(text);
    }
    return result;
  }
  for (std::size_t r = 0; r < lists.size(); ++r) {
    ByteReader reader(lists[r]);
    const std::size_t most = lists[r].size();
    for (auto texts = reader.get<std::uint64_t>(); texts > 0; --texts) {
      const std::string name(reader.get_string(most));
      result.texts[name] = reader.get_string(most);
    }
    const auto count = reader.get<std::uint64_t>();
    for (std::size_t s = 0; s < count; ++s) {
      const std::string name(reader.get_string(most));
      const auto dtype = static_cast<torch::ScalarType>(reader.get<std::int8_t>());
      std::vector<std::int64_t> shape(reader.get<std::uint64_t>());
      for (std::int64_t& size : shape) size = reader.get<std::int64_t>();
      const auto offset = reader.get<std::int64_t>(), elements = reader.get<std::int64_t>();
      Tensor& whole = result.tensors[name];
      if (!whole.defined()) whole = torch::empty(shape, dtype);
      const Tensor part = whole.view({-1}).narrow(0, offset, elements);
      if (r == 0) {
        part.copy_(shards[s].local.reshape({-1}));
      } else {
        group.recv(Buffer{part.data_ptr(), part.nbytes(), DType::uint8}, static_cast<int>(r), kStateTag, {},
                   public_place());
      }
    }
  }
  return result;
}

void restore_shards(ShardedOptimizerBase& optimizer, const NamedState& whole) {
  const torch::NoGradGuard no_grad;
  optimizer.impl().restore_from(whole.texts, whole.tensors,
                                [](const std::string& name, const Tensor& tensor, const ParameterSlice& slice) {
                                  MANIPLE_REQUIRE(tensor.sizes() == slice.parameter.sizes(),
                                                  "{} has shape [{}] in the checkpoint, its parameter [{}]", name,
                                                  joined(tensor.sizes()), joined(slice.parameter.sizes()));
                                  if (slice.is_whole()) return tensor;
                                  return tensor.reshape({-1}).narrow(0, slice.offset, slice.count);
                                });
}

}  // namespace maniple
