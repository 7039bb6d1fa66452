// The process's default group, the only global state of the tensor layer, and queries about the process.
#include <maniple/dist.h>

#include <cstdlib>

#include "comm/backend/backend.h"
#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/run_operation.h"

namespace maniple {
namespace {

// If a program ends without destroy_process_group, atexit calls it while groups still work. A child of fork() begins
// without a default group.
struct Held {
  Mutex mutex;
  std::shared_ptr<ProcessGroup> group MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Held> held;

std::shared_ptr<ProcessGroup> current() {
  Held& mine = *held;
  const MutexLock lock(mine.mutex);
  return mine.group;
}

void require_none() {
  MANIPLE_REQUIRE(current() == nullptr, "init_process_group was called before; call destroy_process_group first");
}

std::shared_ptr<ProcessGroup> or_default(const std::shared_ptr<ProcessGroup>& group) {
  return group ? group : get_default_group();
}

}  // namespace

void init_process_group(const InitOptions& options) {
  require_none();
  init_process_group(init(options));
}

void init_process_group(std::shared_ptr<Store> store, const InitOptions& options) {
  require_none();
  init_process_group(init(std::move(store), options));
}

void init_process_group(std::shared_ptr<ProcessGroup> group) {
  MANIPLE_REQUIRE(group != nullptr, "init_process_group was given no group");
  group->require_member("init_process_group");
  Held& mine = *held;
  const MutexLock lock(mine.mutex);
  MANIPLE_REQUIRE(mine.group == nullptr, "init_process_group was called before; call destroy_process_group first");
  static const int registered = std::atexit(destroy_process_group);
  (void)registered;
  mine.group = std::move(group);
}

void destroy_process_group() {
  std::shared_ptr<ProcessGroup> last;  // declared before the lock, so destroyed after it
  Held& mine = *held;
  const MutexLock lock(mine.mutex);
  last.swap(mine.group);
}

bool is_initialized() noexcept { return current() != nullptr; }

bool is_backend_available(std::string_view backend) noexcept {
  try {
    parse_backend(backend);
    return true;
  } catch (...) {
    return false;
  }
}

std::shared_ptr<ProcessGroup> get_default_group() {
  auto group = current();
  MANIPLE_REQUIRE(group != nullptr,
                  "there is no default group{}; call maniple::init_process_group() first, or pass a group",
                  ForkGuard().is_original() ? "" : " in this child of fork(), which cannot use its parent's");
  return group;
}

int get_rank(const std::shared_ptr<ProcessGroup>& group) { return or_default(group)->rank(); }
int get_world_size(const std::shared_ptr<ProcessGroup>& group) { return or_default(group)->size(); }
std::string get_backend(const std::shared_ptr<ProcessGroup>& group) { return or_default(group)->backend(); }

int get_group_rank(const std::shared_ptr<ProcessGroup>& group, int global_rank) {
  const auto given = or_default(group);
  given->require_member("get_group_rank");
  const auto& members = given->topology().members;
  for (std::size_t r = 0; r < members.size(); ++r) {
    if (members[r].global_rank == global_rank) return static_cast<int>(r);
  }
  throw InvalidArgument(format_text("global rank {} is not in group {}", global_rank, given->name()));
}

int get_global_rank(const std::shared_ptr<ProcessGroup>& group, int group_rank) {
  const auto given = or_default(group);
  given->require_member("get_global_rank");
  MANIPLE_REQUIRE(group_rank >= 0 && group_rank < given->size(), "rank {} in a group of {} ranks", group_rank,
                  given->size());
  return given->topology().members[group_rank].global_rank;
}

int get_local_rank() {
  if (const auto rank = environment_integer("LOCAL_RANK", 0, kMaxWorldSize - 1)) return static_cast<int>(*rank);
  return get_default_group()->topology().local_rank();
}

int get_node_rank() {
  for (const char* name : {"NODE_RANK", "GROUP_RANK"}) {
    if (const auto rank = environment_integer(name, 0, kMaxWorldSize - 1)) return static_cast<int>(*rank);
  }
  return get_default_group()->topology().node_rank();
}

bool is_main_process() {
  if (const auto group = current()) return group->rank() == 0;
  return environment_integer("RANK", 0, kMaxWorldSize - 1).value_or(0) == 0;
}

// Rank 0 sends the outcome: nothing, or a mark and the text of the exception.
void detail::run_main_process_first(const std::function<void()>& function, const DistOptions& options,
                                    const SourceLocation& where) {
  if (!options.group && !is_initialized()) return function();
  const auto group = group_of(options);
  group->require_member("main_process_first");
  if (group->rank() == 0) {
    std::string failure;
    std::exception_ptr thrown;
    try {
      function();
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      failure = format_text("!{}", error.what());
    } catch (...) {
      thrown = std::current_exception();
      failure = "!an exception that is not a std::exception";
    }
    try {
      group->broadcast_object(failure, 0, call_of(options), where);
    } catch (...) {
      if (!thrown) throw;
    }
    if (thrown) std::rethrow_exception(thrown);
    return;
  }
  const std::string failure = group->broadcast_object({}, 0, call_of(options), where);
  if (!failure.empty())
    throw_failed_on<Aborted>(*group, 0, format_text("main_process_first: rank 0 failed: {}", failure.substr(1)));
  function();
}

std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks, const GroupOptions& options,
                                        const SourceLocation& where) {
  return get_default_group()->new_group(ranks, options, {}, where);
}

DeviceMesh init_device_mesh(std::vector<MeshDimension> dimensions, const GroupOptions& options,
                            const SourceLocation& where) {
  return {get_default_group(), std::move(dimensions), options, where};
}

}  // namespace maniple
