#include <maniple/comm/process_group.h>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/threads.h"
#include "comm/group/group_impl.h"
#include "comm/group/validate.h"
#include "comm/session/peer_table.h"

namespace maniple {

ProcessGroup::ProcessGroup(std::unique_ptr<detail::GroupImpl> impl) : impl_(std::move(impl)) {}

ProcessGroup::~ProcessGroup() {
  // In a child of fork() the threads are gone and the memory is the parent's: a teardown would hang or harm the parent.
  if (impl_ && impl_->in_forked_child()) abandon(impl_);
  // A callback of a Work may drop the last handle on a thread that the teardown would wait for. (If no other thread can
  // be started, the group is never destroyed.)
  if (impl_ && on_group_thread) run_apart([impl = impl_.release()] { delete impl; });
}

bool ProcessGroup::is_member() const noexcept { return impl_->is_member(); }
void ProcessGroup::require_member(std::string_view who) const { impl_->require_member(who); }
int ProcessGroup::rank() const noexcept { return impl_->rank(); }
int ProcessGroup::size() const noexcept { return impl_->size(); }
const Topology& ProcessGroup::topology() const noexcept { return impl_->facts().topology; }
const std::string& ProcessGroup::name() const noexcept { return impl_->facts().name; }
const std::string& ProcessGroup::backend() const noexcept { return impl_->facts().backend; }
std::string_view ProcessGroup::transport() const noexcept {
  return is_member() && !impl_->is_detached() ? impl_->backend().transport() : "none";
}
Store& ProcessGroup::store() {
  require_member("store");
  return impl_->store();
}

void ProcessGroup::monitored_barrier(Seconds timeout, const CallOptions& options, const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("monitored_barrier")) return;
  impl_->require_usable(Op::barrier, call.where);
  const std::uint64_t number = impl_->next_monitored();  // also for a refused call, so that later calls match
  require_limit("monitored_barrier: a limit", timeout);
  const auto key = [](std::uint64_t n, int rank) { return fmt::format("monitored/{}/{}", n, rank); };
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(key(number, r));
  store().set(key(number, rank()), "1");
  const Deadline deadline = Deadline::after(timeout);
  constexpr auto kLook = std::chrono::milliseconds(200);  // the failure detector, not the store, knows of lost ranks
  for (;;) {
    try {
      store().wait(keys, Deadline::sooner(deadline, Deadline::after(kLook)));
      break;
    } catch (const Timeout&) {
      impl_->require_usable(Op::barrier, call.where);
      if (!deadline.expired()) continue;
    } catch (const PeerLost&) {
      impl_->require_usable(Op::barrier, call.where);  // the store may be gone because its rank left after a failure
      throw;
    }
    const std::vector<bool> there = store().check(keys);
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r) {
      if (!there[r]) missing.push_back(r);
    }
    if (missing.empty()) break;  // the last rank arrived during the check
    ErrorInfo info = impl_->context_of("monitored_barrier");
    for (const int r : missing) info.ranks.push_back(topology().members[r].global_rank);
    info.waited_s = timeout.count();
    info.reason = fmt::format("timed out after {:.1f} s: {} of {} ranks arrived, waiting for rank{} {}",
                              timeout.count(), size() - static_cast<int>(missing.size()), size(),
                              missing.size() == 1 ? "" : "s", list_ranks(missing));
    throw Timeout(std::move(info));
  }
  // All ranks have left earlier barriers, so their keys are not read any more; neither are the keys of failed ones.
  for (std::uint64_t& cleared = impl_->monitored_cleared(); cleared + 1 < number;)
    store().erase(key(++cleared, rank()));
}

RegisteredMemory ProcessGroup::allocate(std::size_t bytes, const CallOptions& options, const SourceLocation& where) {
  return allocate(bytes, Device{}, options, where);
}

namespace {
constexpr std::size_t kMostBytes = std::size_t{1} << 46;  // the sum over all ranks must not overflow
}

RegisteredMemory ProcessGroup::allocate_shared(std::size_t bytes, const CallOptions& options,
                                               const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("allocate_shared")) return {};
  MANIPLE_REQUIRE(bytes <= kMostBytes, "allocate_shared: {} bytes exceed the maximum of {}", bytes, kMostBytes);
  RegisteredMemory memory;
  impl_->run_tasks(Op::allocate, call, [&](OperationContext& context) {
    const std::int64_t mine = static_cast<std::int64_t>(bytes);
    std::vector<std::int64_t> all(size());
    Operation sizes = all_gather_operation({rank(), size()}, buffer_of(std::span(&mine, 1)), buffer_of(all), {}, call);
    impl_->execute(sizes, context);
    for (std::size_t r = 1; r < all.size(); ++r) {
      MANIPLE_REQUIRE(
          all[r] == all[0],
          "allocate_shared: rank {} of the group asked for {} bytes, rank 0 for {}; all ranks pass the same", r, all[r],
          all[0]);
    }
    try {
      memory = impl_->backend().allocate_shared(bytes, impl_->next_allocation(), context.deadline());
    } catch (const Unsupported&) {  // thrown on all ranks: the group remains usable
      throw;
    } catch (...) {
      sizes.op = Op::allocate;
      impl_->fail(sizes);
    }
    Operation mapped = barrier_operation(call);
    impl_->execute(mapped, context);
  });
  return memory;
}

RegisteredMemory ProcessGroup::allocate(std::size_t bytes, Device device, const CallOptions& options,
                                        const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("allocate")) return {};
  MANIPLE_REQUIRE(bytes <= kMostBytes, "allocate: {} bytes exceed the maximum of {}", bytes, kMostBytes);
  RegisteredMemory memory;
  impl_->run_tasks(Op::allocate, call, [&](OperationContext& context) {
    const std::int64_t mine = static_cast<std::int64_t>(bytes);
    std::vector<std::int64_t> all(size());
    Operation sizes = all_gather_operation({rank(), size()}, buffer_of(std::span(&mine, 1)), buffer_of(all), {}, call);
    impl_->execute(sizes, context);
    try {
      const std::vector<std::size_t> bytes_of_all(all.begin(), all.end());
      const std::uint64_t number = impl_->next_allocation();
      memory = impl_->backend_for(device).allocate(bytes_of_all, number, context.deadline());
    } catch (...) {
      sizes.op = Op::allocate;  // the name of the caller's operation
      impl_->fail(sizes);
    }
    Operation mapped = barrier_operation(call);  // no rank uses the memory before all have it
    impl_->execute(mapped, context);
  });
  return memory;
}

void ProcessGroup::abort(const std::string& reason) {
  if (impl_->takes_part("abort")) impl_->abort(reason);
}
std::exception_ptr ProcessGroup::error() const { return is_member() ? impl_->abort_signal().cause() : nullptr; }
std::vector<std::string> ProcessGroup::recent_operations() const {
  return is_member() ? impl_->recorder().lines() : std::vector<std::string>();
}

}  // namespace maniple
