#include "comm/group/group_impl.h"

#include <poll.h>
#include <pthread.h>

#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/error_codec.h"
#include "comm/base/log.h"
#include "comm/base/threads.h"
#include "comm/collective/algorithms.h"
#include "comm/group/validate.h"
#include "comm/session/mismatch_report.h"

namespace maniple {
namespace {

constexpr const char* kForked =
    "a child of fork() is not a rank and cannot use its parent's groups; start ranks as processes of their own";

/// This thread runs an operation whose failure no caller observes (start_tasks).
thread_local bool nobody_sees = false;

// Inlining makes small operations slower (4 bytes: 0.25 us instead of 0.235).
[[gnu::cold, gnu::noinline]] bool is_loss(const std::exception_ptr& error) {
  return info_of(error).kind == ErrorKind::peer_lost;
}

}  // namespace

detail::GroupImpl::GroupImpl(GroupFacts facts, Deadline deadline)
    : facts_(std::move(facts)), global_rank_(facts_.session->rank()) {
  try {
    set_up(deadline);
  } catch (...) {
    const bool known = abort_ && abort_->raised();
    const ErrorInfo context = context_of(facts_.name == "world" ? "init" : "new_group");
    const std::exception_ptr cause = known ? std::current_exception() : with_context(context, std::current_exception());
    // The other ranks wait for this one; unless they know already, report why it does not arrive.
    if (!known) facts_.session->spread_abort(facts_.name, 0, cause);
    facts_.session->remove_group(facts_.name);
    if (!thrown_.exchange(true)) report_failure(info_of(cause));
    std::rethrow_exception(cause);
  }
}

detail::GroupImpl::GroupImpl(GroupFacts facts) : facts_(std::move(facts)), global_rank_(facts_.session->rank()) {
  facts_.topology = {.rank = -1, .members = {}, .nodes = {}};
  facts_.session.reset();
}

detail::GroupImpl::GroupImpl(GroupFacts facts, std::exception_ptr unusable)
    : facts_(std::move(facts)),
      global_rank_(facts_.topology.rank),
      abort_(std::make_shared<AbortSignal>()),
      store_(make_memory_store()),
      recorder_(std::make_shared<Recorder>(1)) {
  abort_->raise(std::move(unusable));
}

void detail::GroupImpl::warn_not_member(std::string_view operation) {
  if (thrown_.exchange(true)) return;
  log_warning("{} on group {}: rank {} of the world is not in it, so this and later calls do nothing", operation,
              facts_.name, global_rank_);
}

void detail::GroupImpl::require_member(std::string_view who) const {
  MANIPLE_REQUIRE(is_member(),
                  "{}: rank {} of the world is not in group {}; only members can use a group so (is_member() tells)",
                  who, global_rank_, facts_.name);
}

Seconds detail::GroupImpl::limit(const CallOptions& call) const {
  if (!call.timeout) return facts_.timeout;
  require_limit("a time-out", *call.timeout);
  return *call.timeout;
}

void detail::GroupImpl::set_up(Deadline deadline) {
  require_algorithm(facts_.algorithm);
  const BackendChoice choice = parse_backend(facts_.backend);
  host_tensors_ = choice.host_tensors;
  device_engine_ = choice.device != nullptr;
  abort_ = std::make_shared<AbortSignal>();
  store_ = make_prefix_store("maniple/group/" + facts_.name, facts_.session->store());
  recorder_ = std::make_shared<Recorder>(knob_integer(Knob::recorder));
  Session::GroupLink link;
  for (const auto& member : facts_.topology.members) link.members.push_back(member.global_rank);
  link.abort = abort_;
  link.called = [recorder = recorder_](std::uint64_t seq) { return recorder->called(seq); };
  link.compares_arguments = !device_engine_;
  const auto made = std::make_shared<std::atomic<bool>>(false);
  link.progress = [recorder = recorder_, made, since = Deadline::Clock::now()] {
    if (*made) return recorder->last();
    const std::chrono::duration<double> waited = Deadline::Clock::now() - since;
    return CallProgress{.seq = 1, .running = true, .seconds = waited.count(), .call = "making the group"};
  };
  link.departed = [this](int global_rank, std::uint64_t seq) {
    const MutexLock lock(departures_mutex_);
    departures_.emplace(global_rank, seq);
  };
  facts_.session->add_group(facts_.name, std::move(link));
  BackendContext context;
  context.group = facts_.name;
  context.topology = facts_.topology;
  context.session = facts_.session;
  context.abort = abort_;
  context.transport = facts_.transport;
  context.algorithm = facts_.algorithm;
  context.deadline = deadline;
  backend_ = choice.host->make(context);
  const auto gone = [this](int global_rank) {
    const auto& members = facts_.topology.members;
    for (std::size_t r = 0; r < members.size(); ++r) {
      if (members[r].global_rank == global_rank) backend_->mark_gone(static_cast<int>(r));
    }
  };
  facts_.session->open_group(facts_.name, gone, [this] { return oldest_message(); });
  const auto barrier = [&] {
    Operation operation;
    OperationContext op_context(deadline);
    execute(operation, op_context);
  };
  barrier();
  if (choice.device != nullptr) {
    make_engine(*choice.device, context);
    barrier();  // ranks fetch memory from each other, so no rank may leave before all have done so
  }
  made->store(true);
}

// Never runs in a child of fork(): see ~ProcessGroup.
detail::GroupImpl::~GroupImpl() {
  if (!is_member() || is_detached()) return;
  // Device operations were done for the caller once enqueued, but late ranks still need them.
  drain_devices();
  leaving_.store(true);
  // Queued operations must not wait for peers: they fail at once.
  if (queued_.load() != 0) {
    ErrorInfo info = context_of("destroy");
    info.reason = "the group was destroyed with operations under way";
    abort_->raise(make_error(std::move(info)));
  }
  facts_.session->remove_group(facts_.name);
  if (device_engine_ && !abort_->raised()) {
    facts_.session->announce_departure(facts_.name, seq_);
  }
}

int detail::GroupImpl::left_before(std::uint64_t seq) const {
  const MutexLock lock(departures_mutex_);
  for (const auto& [rank, last] : departures_) {
    if (last < seq) return rank;
  }
  return -1;
}

ErrorInfo detail::GroupImpl::context_of(std::string_view operation, std::uint64_t sequence,
                                        std::string arguments) const {
  ErrorInfo info;
  info.operation = operation;
  info.sequence = sequence;
  info.arguments = std::move(arguments);
  info.group = facts_.name;
  info.rank = rank();
  info.size = size();
  info.origin = global_rank_;
  return info;
}

void detail::GroupImpl::throw_unusable(Op op, const SourceLocation& where) {
  std::string place = place_text(where.file_name(), where.line());
  if (!place.empty()) place = fmt::format(" ({})", call_at("call", place));
  if (in_forked_child()) {
    ErrorInfo info = context_of("after fork");
    info.reason = kForked + place;
    throw Aborted(std::move(info));
  }
  // The group failed between two of this rank's calls: the first call to notice throws the failure unchanged.
  const std::exception_ptr cause = abort_->cause();
  if (!thrown_.load()) {
    const ErrorInfo context = context_of(to_string(op), seq_ + 1);
    MutexLock lock(unseen_mutex_);
    const std::exception_ptr first = unseen_ ? unseen_ : cause;
    lock.unlock();
    std::rethrow_exception(failure(first, context));
  }
  const ErrorInfo first = info_of(cause);
  ErrorInfo info = context_of("aborted");
  info.ranks = first.ranks;
  info.origin = first.origin;
  info.loss = first.loss;
  info.calls = first.calls;
  info.reason = "the group had failed before: " + text_of(cause) + place;
  throw Aborted(std::move(info));
}

void detail::GroupImpl::execute(Operation& op, OperationContext& op_context) {
  op.seq = ++seq_;
  op.ranks = size();
  auto record = [this, &op, &op_context] { op_context.set_start(recorder_->begin(op)); };
  op_context.while_waiting(record);
  if (!backend_->reports_publication()) op_context.contribution_published();
  try {
    backend_->run(op, op_context);
  } catch (...) {
    op_context.contribution_published();
    recorder_->end(op.seq, true);
    fail(op);
  }
  recorder_->end(op.seq, false, op_context.take_end());
}

void detail::GroupImpl::fail(const Operation& op) {
  try {
    throw;
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Unsupported&) {
    throw;
  } catch (...) {
    const ErrorInfo context = context_of(to_string(op.op), op.seq);
    std::rethrow_exception(failure(propagate(std::current_exception(), context), context));
  }
}

std::exception_ptr detail::GroupImpl::failure(const std::exception_ptr& error, const ErrorInfo& context) {
  std::exception_ptr thrown = with_context(context, error);
  if (nobody_sees) {
    keep_unseen(thrown);
  } else if (!thrown_.exchange(true)) {
    report_failure(info_of(thrown));
  }
  return thrown;
}

void detail::GroupImpl::keep_unseen(const std::exception_ptr& error) {
  const MutexLock lock(unseen_mutex_);
  if (unseen_ || thrown_.load()) return;
  unseen_ = error;
  report_failure(info_of(error));
}

std::exception_ptr detail::GroupImpl::propagate(const std::exception_ptr& error, const ErrorInfo& context) {
  if (leaving_.load()) return error;
  const ErrorInfo info = info_of(error);
  const ErrorKind kind = info.kind;
  // A rank that gets the Mismatch first may end at once; its loss is a consequence.
  if (abort_->raised()) return kind == ErrorKind::mismatch && is_loss(abort_->cause()) ? error : abort_->cause();
  const bool asks = asks_for_calls(info, context.sequence);
  // Ranks that share memory already have all calls, unless the error names a call to query.
  const bool all_know = kind == ErrorKind::mismatch && info.sequence == 0 && backend_ && backend_->all_share_memory();
  if (facts_.session->has_failure_detector() && !all_know) {
    // The detector's leader passes the error on; this rank receives it last. The leader knows which rank was lost
    // first. For a mismatch it queries all ranks' calls before, for a lost connection whether the other rank lives.
    const std::uint64_t asked = info.sequence != 0 ? info.sequence : context.sequence;
    facts_.session->spread_abort(facts_.name, asked,
                                 asks && kind == ErrorKind::mismatch ? error : with_context(context, error));
    pollfd raised{abort_->fd(), POLLIN, 0};
    ::poll(&raised, 1, Deadline::after(detector::kVerdictLimit).poll_ms());
  }
  if (!abort_->raised() || !(asks || kind == ErrorKind::peer_lost)) {
    abort_->raise(with_context(context, error));
    return error;
  }
  ErrorInfo verdict = info_of(abort_->cause());
  // Unless a time-out came back as a failure of this rank. (The origin of a loss is the lost rank.)
  if (kind != ErrorKind::timeout || verdict.kind != ErrorKind::aborted || verdict.origin != facts_.session->rank())
    return abort_->cause();
  ErrorInfo own = info;
  own.ranks = std::move(verdict.ranks);
  own.reason = std::move(verdict.reason);
  return make_error(std::move(own));
}

void detail::GroupImpl::abort(const std::string& reason) {
  ErrorInfo info = context_of(in_forked_child() ? "after fork" : "abort");
  info.reason = in_forked_child() ? kForked : reason;
  if (in_forked_child()) throw Aborted(std::move(info));
  const auto cause = make_error(std::move(info));
  if (abort_->raise(cause)) facts_.session->spread_abort(facts_.name, 0, cause);
}

Work detail::GroupImpl::start(Operation operation, const CallOptions& call) {
  const Op op = operation.op;
  return start_tasks(op, call, [this, operation = std::move(operation)](OperationContext& op_context) mutable {
    execute(operation, op_context);
  });
}

Work detail::GroupImpl::start_tasks(Op op, const CallOptions& call, std::function<void(OperationContext&)> body,
                                    bool seen) {
  require_usable(op, call.where);
  auto state = std::make_shared<detail::WorkState>();
  const Deadline deadline = Deadline::after(limit(call));
  queued_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push([this, state, body = std::move(body), deadline, op, call, seen] {
    std::exception_ptr error;
    nobody_sees = !seen;
    // An earlier synchronous call may still be running inline.
    while (busy_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    try {
      require_usable(op, call.where);
      OperationContext op_context(deadline);
      body(op_context);
    } catch (...) {
      error = std::current_exception();
    }
    nobody_sees = false;
    busy_.store(false, std::memory_order_release);
    queued_.fetch_sub(1, std::memory_order_acq_rel);
    state->finish(std::move(error));
  });
  return Work(state);
}

TaskQueue::~TaskQueue() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void TaskQueue::push(std::function<void()> task) {
  {
    const MutexLock lock(mutex_);
    if (!thread_.joinable()) {
      thread_ = start_thread("the operations of a group", [this] { run(); });
      ::pthread_setname_np(thread_.native_handle(), "maniple-group");
    }
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void TaskQueue::run() {
  on_group_thread = true;
  MutexLock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this]() MANIPLE_REQUIRES(mutex_) { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace maniple
