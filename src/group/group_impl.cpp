#include "group/group_impl.h"

#include <poll.h>

#include <thread>

#include <fmt/format.h>

#include "base/check.h"
#include "base/environment.h"
#include "base/log.h"
#include "collective/selection.h"
#include "group/validate.h"

namespace maniple {
namespace {

constexpr const char* kForked =
    "a child of fork() is not a rank and cannot use its parent's groups; start ranks as processes of their own";

}  // namespace

ProcessGroup::Impl::Impl(GroupFacts facts, Deadline deadline)
    : facts_(std::move(facts)), global_rank_(facts_.session->rank()), generation_(fork_generation()) {
  try {
    set_up(deadline);
  } catch (...) {
    const bool told = abort_ && abort_->raised();
    const std::string who = prefix(facts_.name == "world" ? "join" : "new group");
    const std::exception_ptr cause = told ? std::current_exception() : with_prefix(who, std::current_exception());
    // The others wait for this rank; unless they know already, they are told why it does not come.
    if (!told) facts_.session->spread_abort(facts_.name, 0, cause);
    facts_.session->remove_group(facts_.name);
    std::rethrow_exception(cause);
  }
}

ProcessGroup::Impl::Impl(GroupFacts facts)
    : facts_(std::move(facts)), global_rank_(facts_.session->rank()), generation_(fork_generation()) {
  facts_.topology = {.rank = -1, .members = {}, .nodes = {}};
  facts_.session.reset();
}

void ProcessGroup::Impl::say_not_member(std::string_view verb) {
  if (told_.exchange(true)) return;
  log_warning("{} on group {}: rank {} of the world is not in it, so this and later calls do nothing", verb,
              facts_.name, global_rank_);
}

void ProcessGroup::Impl::require_member(std::string_view who) const {
  MANIPLE_REQUIRE(is_member(), "{}: rank {} of the world is not in group {}; only members can use a group so (is_member() tells)", who,
                  global_rank_, facts_.name);
}

Seconds ProcessGroup::Impl::limit(const Call& call) const {
  if (!call.options.timeout) return facts_.timeout;
  require_limit("a time-out", *call.options.timeout);
  return *call.options.timeout;
}

void ProcessGroup::Impl::set_up(Deadline deadline) {
  require_algorithm(facts_.algorithm);
  const BackendEntry& entry = find_backend(facts_.backend);
  abort_ = std::make_shared<AbortSignal>();
  store_ = make_prefix_store("maniple/group/" + facts_.name, facts_.session->store());
  recorder_ = std::make_shared<Recorder>(static_cast<std::size_t>(knob_integer(Knob::recorder)));
  Session::GroupLink link;
  for (const auto& member : facts_.topology.members) link.members.push_back(member.global_rank);
  link.abort = abort_;
  link.called = [recorder = recorder_](std::uint64_t seq) { return recorder->called(seq); };
  link.progress = [recorder = recorder_] { return recorder->last(); };
  facts_.session->add_group(facts_.name, std::move(link));
  BackendContext context;
  context.group = facts_.name;
  context.topology = facts_.topology;
  context.session = facts_.session;
  context.abort = abort_;
  context.transport = facts_.transport;
  context.algorithm = facts_.algorithm;
  context.deadline = deadline;
  backend_ = entry.make(context);
  const auto gone = [this](int global_rank) {
    const auto& members = facts_.topology.members;
    for (std::size_t r = 0; r < members.size(); ++r) {
      if (members[r].global_rank == global_rank) backend_->mark_gone(static_cast<int>(r));
    }
  };
  facts_.session->open_group(facts_.name, gone, [this] { return oldest_message(); });
  Operation barrier;
  OperationContext op_context(deadline);
  execute(barrier, op_context);
}

ProcessGroup::Impl::~Impl() {
  if (!is_member()) return;
  leaving_.store(true);
  // What is queued must not wait for peers: it fails at once.
  if (queued_.load() != 0) {
    abort_->raise(std::make_exception_ptr(Aborted(prefix("destroy") + "the group was destroyed with operations under way")));
  }
  facts_.session->remove_group(facts_.name);
}

std::string ProcessGroup::Impl::prefix(const std::string& call) const {
  return fmt::format("[{} {} rank {}/{}] ", call, facts_.name, rank(), size());
}

void ProcessGroup::Impl::throw_unusable(Op op, const Call& call) {
  const std::string place = fmt::format(" (call at {}:{})", call.where.file_name(), call.where.line());
  if (in_forked_child()) {
    throw Aborted(prefix("after fork") + kForked + place);
  }
  // The group failed between two calls of this rank: the first of them to meet the failure throws it as it is.
  if (!told_.exchange(true)) {
    std::rethrow_exception(with_prefix(prefix(fmt::format("{} #{}", to_string(op), seq_ + 1)), abort_->cause()));
  }
  throw Aborted(prefix("aborted") + "the group had failed before: " + text_of(abort_->cause()) + place);
}

void ProcessGroup::Impl::execute(Operation& op, OperationContext& op_context) {
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

void ProcessGroup::Impl::fail(const Operation& op) {
  try {
    throw;
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Unsupported&) {
    throw;
  } catch (...) {
    const std::string who = prefix(fmt::format("{} #{}", to_string(op.op), op.seq));
    const std::exception_ptr cause = with_prefix(who, settle(std::current_exception(), op.seq, who));
    told_.store(true);
    std::rethrow_exception(cause);
  }
}

std::exception_ptr ProcessGroup::Impl::settle(std::exception_ptr error, std::uint64_t seq, const std::string& who) {
  if (leaving_.load()) return error;
  const auto await_word = [this](int milliseconds) {
    pollfd bell{abort_->fd(), POLLIN, 0};
    ::poll(&bell, 1, milliseconds);
  };
  ErrorKind kind = ErrorKind::aborted;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    kind = e.kind();
  } catch (...) {
  }
  const bool watched = facts_.session->has_watch();
  // The watch knows who died first; its word is milliseconds away.
  if (kind == ErrorKind::peer_lost && watched && !abort_->raised()) await_word(150);
  if (abort_->raised()) return abort_->cause();
  if (watched && !(kind == ErrorKind::mismatch && backend_ && backend_->all_share_memory())) {
    // The hub of the watch passes it on (and, for a mismatch, first asks all ranks what they called); we hear of it last.
    const bool asks = kind == ErrorKind::mismatch && seq != 0;
    facts_.session->spread_abort(facts_.name, seq, asks ? error : with_prefix(who, error));
    await_word(asks ? 1500 : 100);
    if (asks && abort_->raised()) return abort_->cause();
  }
  abort_->raise(with_prefix(who, error));
  return error;
}

void ProcessGroup::Impl::abort(const std::string& reason) {
  if (in_forked_child()) throw Aborted(prefix("after fork") + kForked);
  const auto cause = std::make_exception_ptr(Aborted(prefix("abort") + reason));
  if (abort_->raise(cause)) facts_.session->spread_abort(facts_.name, 0, cause);
}

Work ProcessGroup::Impl::start(Operation operation, const Call& call) {
  const Op op = operation.op;
  return start_tasks(op, call, [this, operation = std::move(operation)](OperationContext& op_context) mutable { execute(operation, op_context); });
}

Work ProcessGroup::Impl::start_tasks(Op op, const Call& call, std::function<void(OperationContext&)> body) {
  require_usable(op, call);
  auto state = std::make_shared<Work::State>();
  const Deadline deadline = Deadline::after(limit(call));
  queued_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push([this, state, body = std::move(body), deadline, op, call] {
    std::exception_ptr error;
    // A synchronous call that began before us may still be running inline.
    while (busy_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    try {
      require_usable(op, call);
      OperationContext op_context(deadline);
      body(op_context);
    } catch (...) {
      error = std::current_exception();
    }
    busy_.store(false, std::memory_order_release);
    queued_.fetch_sub(1, std::memory_order_acq_rel);
    state->finish(std::move(error));
  });
  return Work(state);
}

std::exception_ptr with_prefix(const std::string& prefix, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    return std::make_exception_ptr(PeerLost(prefix + e.what(), e.rank()));
  } catch (const Timeout& e) {
    return std::make_exception_ptr(Timeout(prefix + e.what()));
  } catch (const Aborted& e) {
    return std::make_exception_ptr(Aborted(prefix + e.what()));
  } catch (const Mismatch& e) {
    return std::make_exception_ptr(Mismatch(prefix + e.what()));
  } catch (const ProtocolError& e) {
    return std::make_exception_ptr(ProtocolError(prefix + e.what()));
  } catch (const SystemError& e) {
    return std::make_exception_ptr(SystemError(prefix + e.what(), e.code()));
  } catch (...) {
    return error;
  }
}

}  // namespace maniple
