// State shared by the units of a group: scratch memory, gathering ahead, and the course of a backward.
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "train/ddp/bucket.h"
#include "train/fully_sharded/unit.h"
#include "train/tensor/public_call.h"

namespace maniple::detail {
namespace {

/// The contexts of this process, by group. Ranks may be threads, each with its own groups.
struct Contexts {
  Mutex mutex;
  std::map<std::tuple<ProcessGroup*, ProcessGroup*, Overlap>, std::weak_ptr<ShardContext>> by_group
      MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Contexts> contexts;

auto key_of(const FullyShardOptions& options) {
  return std::make_tuple(options.group.get(), options.replicate_group.get(), options.overlap);
}

}  // namespace

std::shared_ptr<ShardContext> ShardContext::of(const FullyShardOptions& options) {
  Contexts& all = *contexts;
  {
    const MutexLock lock(all.mutex);
    if (auto found = all.by_group[key_of(options)].lock()) return found;
  }
  auto made = std::make_shared<ShardContext>(options);
  const MutexLock lock(all.mutex);
  all.by_group[key_of(options)] = made;
  return made;
}

// Passes a large byte count to resolve_overlap(): here only cores and hosts decide whether a thread pays.
ShardContext::ShardContext(const FullyShardOptions& options)
    : group_(options.group),
      replicate_(options.replicate_group),
      overlaps_(group_->size() > 1 &&
                resolve_overlap(options.overlap, *group_, std::size_t{1} << 30) == Overlap::thread) {}

ShardContext::~ShardContext() {
  for (auto& [use, work] : work_) {
    try {
      if (work.valid()) work.wait();  // it writes to the scratch, which is destroyed next
    } catch (...) {
    }
  }
  Contexts& all = *contexts;
  const MutexLock lock(all.mutex);
  auto& table = all.by_group;
  for (auto entry = table.begin(); entry != table.end();)
    entry = entry->second.expired() ? table.erase(entry) : std::next(entry);
}

int ShardContext::add(ShardUnit* unit) {
  units_.push_back(unit);
  return next_number_++;
}

void ShardContext::remove(ShardUnit* unit) noexcept {
  units_.erase(std::remove(units_.begin(), units_.end(), unit), units_.end());
  for (int phase = 0; phase < 2; ++phase) {
    next_[phase].erase(unit);
    for (auto entry = next_[phase].begin(); entry != next_[phase].end();)
      entry = entry->second == unit ? next_[phase].erase(entry) : std::next(entry);
  }
  if (last_ == unit) last_ = nullptr;
  if (ahead_ == unit) ahead_ = nullptr;  // its gather continues; the next gather waits for it and discards it
  if (reducing_ == unit) reducing_ = nullptr;
}

// Allocates the max size that any unit needs, so that the memory is normally allocated once.
const RegisteredMemory& ShardContext::scratch(Use use, std::size_t bytes, torch::Device device) {
  if (!asynchronous(device)) use = Use::gather;  // gather and reduce never run concurrently
  Scratch& one = scratch_[{use, device.str()}];
  if (one.bytes >= bytes && one.memory.data() != nullptr) return one.memory;
  for (const ShardUnit* unit : units_) {
    if (unit->device() != device) continue;
    if (use == Use::gather) bytes = std::max(bytes, unit->gather_bytes());
    if (use == Use::reduce || !asynchronous(device)) bytes = std::max(bytes, unit->reduce_bytes());
  }
  one.memory = RegisteredMemory();
  one.memory = allocate_for(*group_, std::max<std::size_t>(bytes, 1), device_for(device));
  one.bytes = bytes;
  return one.memory;
}

std::size_t ShardContext::scratch_bytes() const {
  std::size_t gathered = 0, reduced = 0;
  bool both = overlaps_;
  for (const ShardUnit* unit : units_) {
    gathered = std::max(gathered, unit->gather_bytes());
    reduced = std::max(reduced, unit->reduce_bytes());
    both = both || !unit->device().is_cpu();
  }
  return both ? gathered + reduced : std::max(gathered, reduced);
}

void ShardContext::start(Use use, torch::Device device, const std::function<Work(const CallOptions&)>& operation) {
  if (!device.is_cpu()) {
    side_.run(device_for(device), [&] {
      work_[use] = operation({.stream = current_stream_on(device_for(device)), .where = public_place()});
    });
    return;
  }
  if (overlaps_) {
    work_[use] = operation({.async_op = true, .where = public_place()});
  } else {
    operation({.where = public_place()});
  }
}

void ShardContext::wait(Use use, torch::Device device) {
  if (!device.is_cpu()) return side_.join(device_for(device));  // not this thread's streams on other devices
  if (Work work = std::exchange(work_[use], Work()); work.valid()) work.wait();
}

void ShardContext::require_good(Use use) {
  if (const Work& work = work_[use]; work.valid()) work.synchronize();
}

// ---- Passes --------------------------------------------------------------------------------------------------------

// Ranks decide alike, because decisions depend only on the order of unit calls, which is the same on all ranks.
void ShardContext::gather(ShardUnit& unit) {
  const std::lock_guard lock(mutex);
  if (std::exchange(ahead_, nullptr) != &unit) {
    wait(Use::gather, unit.device());  // wait for a gather that was started ahead and is not needed
    unit.start_gather();
  }
  unit.finish_gather();
  if (!running_ && forwards_ == 0) return;
  auto& next_of = next_[running_ ? 1 : 0];
  if (last_ != nullptr) next_of[last_] = &unit;
  last_ = &unit;
  const auto found = next_of.find(&unit);
  if (found == next_of.end()) return;
  ShardUnit& next = *found->second;
  if (next.exposed() || !asynchronous(unit.device()) || next.device() != unit.device()) return;
  next.start_gather();
  ahead_ = &next;
}

// A gather that has started continues, and the next gather waits for it. Its result is discarded: it has already read
// the shards, which programs may write between passes.
void ShardContext::end_pass() noexcept {
  if (last_ != nullptr) next_[running_ ? 1 : 0].erase(last_);
  last_ = nullptr;
  ahead_ = nullptr;
}

void ShardContext::enter_forward() {
  const std::lock_guard lock(mutex);
  if (forwards_++ == 0 && !running_) end_pass();
}

void ShardContext::leave_forward() noexcept {
  const std::lock_guard lock(mutex);
  if (--forwards_ == 0 && !running_) end_pass();
}

// ---- A backward -----------------------------------------------------------------------------------------------------

namespace {

/// Lives in autograd's list of callbacks. If backward throws, autograd destroys it without calling it.
class EndOfBackward {
 public:
  explicit EndOfBackward(std::weak_ptr<ShardContext> context) : context_(std::move(context)) {}
  ~EndOfBackward() {
    if (const auto context = context_.lock(); context && !called_) context->abandon("backward");
  }
  void call() {
    called_ = true;
    const auto context = context_.lock();
    if (!context) return;
    try {
      const PublicCall call("the backward of a fully sharded module");
      context->finish_backward();
    } catch (...) {
      context->abandon("backward");
      throw;
    }
  }

 private:
  std::weak_ptr<ShardContext> context_;
  bool called_ = false;
};

}  // namespace

void ShardContext::enter_backward() {
  if (running_) return;
  at_end_of_backward([end = std::make_shared<EndOfBackward>(weak_from_this())] { end->call(); });
  end_pass();
  running_ = true;
  failure_ = nullptr;
  reached_.clear();
}

void ShardContext::note(const NodePointer<GatheredBy>& node) { nodes_.emplace_back(node); }

void ShardContext::finish_reducing() {
  if (ShardUnit* unit = std::exchange(reducing_, nullptr)) unit->finish_reduce();
}

void ShardContext::finish_backward() {
  const std::lock_guard lock(mutex);
  require_success();
  for (const auto& one : std::exchange(nodes_, {})) {
    if (const auto node = one.lock()) node->leave();
  }
  reduce_waiting();
  finish_reducing();
  end_pass();
  ++backwards_;
  running_ = false;
}

// Gradients accumulated without synchronisation are averaged now, also in units that this backward did not reach. All
// ranks know which units may have such gradients, but not whether another rank has: ranks may use different parameters.
void ShardContext::reduce_waiting() {
  std::vector<ShardUnit*> units;
  for (ShardUnit* unit : units_) {
    if (unit->waiting && unit->unsynced == 0 && reached_.count(unit->family) != 0 && !unit->trained().empty())
      units.push_back(unit);
  }
  if (units.empty()) return;
  finish_reducing();
  std::vector<std::uint8_t> has;
  for (ShardUnit* unit : units) has.push_back(unit->has_accumulated() ? 1 : 0);
  for (const auto& group : {group_, replicate_}) {
    if (!group || group->size() == 1) continue;
    std::vector<std::uint8_t> any(has.size());
    for (const std::string& other :
         group->all_gather_objects(std::string(has.begin(), has.end()), {}, public_place())) {
      for (std::size_t i = 0; i < any.size() && i < other.size(); ++i) any[i] |= static_cast<std::uint8_t>(other[i]);
    }
    has = any;
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    units[i]->waiting = false;
    if (has[i] != 0) units[i]->reduce_accumulated();
  }
}

void ShardContext::abandon(const std::string& what) noexcept {
  end_pass();
  running_ = false;
  ++backwards_;  // what it gathered is concealed: a later backward through the same graph gathers again
  for (const auto& one : std::exchange(nodes_, {})) {
    if (const auto node = one.lock()) node->leave();
  }
  try {
    abort(
        format_text("{} of a fully sharded module failed on rank {} (its own output says why): the other ranks would "
                    "wait for its part of the parameters",
                    what, group_->rank()));
  } catch (...) {
  }
  reducing_ = nullptr;
  failure_ = nullptr;
  for (auto& [use, work] : work_) {
    try {
      if (Work left = std::exchange(work, Work()); left.valid()) left.wait();
    } catch (...) {
    }
  }
  for (ShardUnit* unit : units_) unit->forget_gradients();
}

void ShardContext::abort(const std::string& why) noexcept {
  try {
    for (const auto& group : {group_, replicate_}) {
      if (group && group->size() > 1 && !group->error()) group->abort(why);
    }
  } catch (...) {
    // No memory for the text: other ranks wait until their deadline.
  }
}

}  // namespace maniple::detail
