#include <maniple/train/tensor_layout.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "train/tensor_layout.h"

namespace maniple {
namespace {

/// The layouts of all divided parameters of this process.
class Layouts {
 public:
  static Layouts& all() {
    static auto* const layouts = new Layouts;  // parameters in static objects may outlive any other static object
    return *layouts;
  }

  void set(const torch::Tensor& tensor, TensorLayout layout) {
    Record record{Weak(tensor.getIntrusivePtr()), {}, {}};
    for (const auto& group : std::exchange(layout.divided_over, {})) record.groups.emplace_back(group);
    record.layout = std::move(layout);
    const MutexLock lock(mutex_);
    if (records_.size() >= sweep_at_) {
      std::erase_if(records_, [](const auto& entry) { return entry.second.tensor.expired(); });
      sweep_at_ = 2 * records_.size() + kLeastRecords;
    }
    records_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(record));
  }

  TensorLayout of(const torch::Tensor& tensor) {
    const MutexLock lock(mutex_);
    const auto found = records_.find(tensor.unsafeGetTensorImpl());
    if (found == records_.end()) return {};
    if (found->second.tensor.expired()) {  // record of an earlier tensor at the same address
      records_.erase(found);
      return {};
    }
    TensorLayout layout = found->second.layout;
    for (const auto& group : found->second.groups) {
      layout.divided_over.push_back(group.lock());
      MANIPLE_REQUIRE(layout.divided_over.back() != nullptr,
                      "a parameter that {} divides is used after its process group was destroyed; keep the group "
                      "and the module as long as the parameters",
                      layout.owner);
    }
    return layout;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Record {
    Weak tensor;
    std::vector<std::weak_ptr<ProcessGroup>> groups;
    TensorLayout layout;
  };
  static constexpr std::size_t kLeastRecords = 1024;

  ForkSafeMutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Record> records_ MANIPLE_GUARDED_BY(mutex_);
  std::size_t sweep_at_ MANIPLE_GUARDED_BY(mutex_) = kLeastRecords;
};

}  // namespace

std::string TensorLayout::text() const {
  if (!divided()) return "replicated";
  std::vector<int> sizes;
  for (const auto& group : divided_over) sizes.push_back(group->size());
  std::string result = format_text("divided over {} ranks by {}", joined(sizes, " x "), owner);
  if (!shard.offset.empty())
    result +=
        format_text(", from [{}] of [{}]", joined(shard.offset), joined(shard.view.empty() ? shard.shape : shard.view));
  if (!counted) result += ", tied to a parameter of another rank";
  return result;
}

TensorLayout layout_of(const torch::Tensor& tensor) {
  return tensor.defined() ? Layouts::all().of(tensor) : TensorLayout();
}

void set_layout(const torch::Tensor& tensor, TensorLayout layout) {
  MANIPLE_REQUIRE(tensor.defined(), "set_layout: the tensor is undefined");
  for (const auto& group : layout.divided_over) {
    MANIPLE_REQUIRE(group != nullptr, "set_layout: divided_over holds a null group");
    group->require_member("set_layout: divided_over");
  }
  layout.shard.name.clear();
  layout.shard.local = torch::Tensor();
  Layouts::all().set(tensor, std::move(layout));
}

DividedParameter first_divided(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    TensorLayout layout = layout_of(item.value());
    if (layout.divided()) return {item.key(), std::move(layout)};
  }
  return {};
}

namespace detail {

std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const torch::Tensor& tensor : tensors) {
    if (!tensor.defined() || seen.insert(tensor.unsafeGetTensorImpl()).second) result.push_back(tensor);
  }
  return result;
}

int shared_ranks(const ProcessGroup& a, const ProcessGroup& b) {
  int count = 0;
  for (const auto& one : a.topology().members) {
    for (const auto& other : b.topology().members) count += one.global_rank == other.global_rank ? 1 : 0;
  }
  return count;
}

bool same_ranks(const ProcessGroup& a, const ProcessGroup& b) {
  return &a == &b || (a.size() == b.size() && shared_ranks(a, b) == a.size());
}

std::vector<std::shared_ptr<ProcessGroup>> dividing_groups(const std::vector<torch::Tensor>& parameters,
                                                           const std::shared_ptr<ProcessGroup>& given) {
  struct Found {
    std::shared_ptr<ProcessGroup> group;
    std::size_t depth;
  };
  std::vector<Found> found;
  bool known = given == nullptr;
  for (const torch::Tensor& parameter : parameters) {
    const TensorLayout layout = layout_of(parameter);
    for (std::size_t depth = 0; depth < layout.divided_over.size(); ++depth) {
      const bool is_given = given && same_ranks(*given, *layout.divided_over[depth]);
      const auto& group = is_given ? given : layout.divided_over[depth];
      known = known || is_given;
      const auto place = std::find_if(found.begin(), found.end(), [&](const Found& one) { return one.group == group; });
      if (place == found.end()) {
        found.push_back({group, depth});
      } else {
        place->depth = std::max(place->depth, depth);
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.depth > b.depth; });
  std::vector<std::shared_ptr<ProcessGroup>> groups;
  for (Found& one : found) groups.push_back(std::move(one.group));
  if (!known) groups.push_back(given);
  return groups;
}

void require_replicated_over(const ProcessGroup& group, const std::string& name, const torch::Tensor& parameter,
                             const char* function, const char* remedy) {
  const TensorLayout layout = layout_of(parameter);
  MANIPLE_REQUIRE(layout.kind != LayoutKind::fully_sharded,
                  "{}: parameter {} is {}, so this rank holds some of its rows; {}", function, name, layout.text(),
                  remedy);
  for (const auto& ranks : layout.divided_over) {
    MANIPLE_REQUIRE(shared_ranks(group, *ranks) <= 1,
                    "{}: parameter {} is {}, and group {} holds several of these ranks; pass a group whose ranks hold "
                    "the same part of every parameter (another dimension of the mesh)",
                    function, name, layout.text(), group.name());
  }
}

void require_whole(const std::string& name, const torch::Tensor& parameter, const char* function, const char* remedy) {
  const TensorLayout layout = layout_of(parameter);
  for (const auto& group : layout.divided_over)
    MANIPLE_REQUIRE(group->size() == 1, "{}: parameter {} is {}, so this rank does not hold the whole model; {}",
                    function, name, layout.text(), remedy);
}

void require_whole(const torch::nn::Module& module, const char* function, const char* remedy) {
  for (const auto& item : module.named_parameters()) require_whole(item.key(), item.value(), function, remedy);
}

}  // namespace detail
}  // namespace maniple
