#include "train/fully_sharded/forward_calls.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "comm/base/mutex.h"
#include "train/fully_sharded/unit.h"

namespace maniple::detail {
namespace {

thread_local std::shared_ptr<ForwardCall> innermost_call;

class CallTable {
 public:
  static CallTable& all() {
    static auto* const table = new CallTable;  // graphs in static objects may outlive any other static object
    return *table;
  }

  void add(ForwardCall& call) {
    const MutexLock lock(mutex_);
    by_begin_[call.thread][call.begin] = &call;
  }
  void end(ForwardCall& call, std::uint64_t end) {
    const MutexLock lock(mutex_);
    call.end = end;
  }
  void remove(const ForwardCall& call) {
    const MutexLock lock(mutex_);
    const auto calls = by_begin_.find(call.thread);
    if (calls == by_begin_.end()) return;
    calls->second.erase(call.begin);
    if (calls->second.empty()) by_begin_.erase(calls);
  }

  /// The calls that created this node and have ended, outermost first.
  c10::SmallVector<NodePointer<GatheredBy>, 4> creators_of(std::uint64_t thread, std::uint64_t node) {
    c10::SmallVector<NodePointer<GatheredBy>, 4> found;
    {
      const MutexLock lock(mutex_);
      const auto calls = by_begin_.find(thread);
      if (calls == by_begin_.end()) return found;
      auto after = calls->second.upper_bound(node);
      if (after == calls->second.begin()) return found;
      for (ForwardCall* call = std::prev(after)->second; call != nullptr; call = call->outer.get()) {
        if (call->open() || node >= call->end) continue;
        if (auto live = call->node.lock()) found.push_back(std::move(live));
      }
    }
    std::reverse(found.begin(), found.end());
    return found;
  }

 private:
  ForkSafeMutex mutex_;
  std::unordered_map<std::uint64_t, std::map<std::uint64_t, ForwardCall*>> by_begin_ MANIPLE_GUARDED_BY(mutex_);
};

std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& node) {
  for (const auto& call :
       CallTable::all().creators_of(node.forwardThreadId(), static_cast<std::uint64_t>(node.seqNr())))
    call->enter_early();
  return nullptr;
}

void observe_backwards() {
  static const at::CallbackHandle installed =
      at::addGlobalCallback(at::RecordFunctionCallback(&before_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  (void)installed;
}

}  // namespace

ForwardCall::ForwardCall(const NodePointer<GatheredBy>& given) : node(given) {}

std::shared_ptr<ForwardCall> ForwardCalls::begin(const NodePointer<GatheredBy>& node) {
  observe_backwards();
  auto call = std::make_shared<ForwardCall>(node);
  call->thread = at::RecordFunction::currentThreadId();
  call->begin = at::sequence_number::peek();
  call->outer = innermost_call;
  CallTable::all().add(*call);
  innermost_call = call;
  return call;
}

void ForwardCalls::end(ForwardCall& call) noexcept {
  innermost_call = call.outer;
  CallTable::all().end(call, at::sequence_number::peek());
}

void ForwardCalls::remove(const ForwardCall& call) noexcept { CallTable::all().remove(call); }

}  // namespace maniple::detail
