// Gloo as a plugin backend: one Gloo context per group, connected through the job's own store, and Gloo's collectives.
//
// Data moves as bytes. Reductions use the native backend's kernels, two operands at a time. The result is right if
// partial results are exact in the element's type or rounded like the type's own sums. It would be wrong for sums and
// products of 16-bit floats, which must be rounded only once, after the last operand. Maniple supplies those operations
// and the ones that Gloo lacks.
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <ctime>
#include <memory>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/common/error.h>
#include <gloo/gather.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/scatter.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "comm/backend/plugin/plugin.h"
#include "comm/base/mutex.h"

namespace maniple::gloo_plugin {

// A group's Gloo context, with one deadline per operation and waits that can be interrupted from another thread.
//
// Gloo applies its timeout to every single wait of a collective, and only that timeout ends a wait on a living peer.
// Here the transport hands out buffers that wrap Gloo's. Their waits last until the operation's deadline or until
// `interrupt`, and then throw GivenUp through Gloo's code.

/// Not reported as an error: the plugin returns false and its owner reports the reason.
struct GivenUp {};

/// Gloo writes to sockets as to files, so writing to a dead peer raises SIGPIPE, which would end the process. Until
/// destroyed, this blocks SIGPIPE in the calling thread and the threads it starts; the write then fails with an error
/// that Gloo throws. The rest of the program keeps its handling of SIGPIPE.
class NoBrokenPipe {
 public:
  NoBrokenPipe() noexcept {
    sigset_t pending;
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoBrokenPipe() {
    const timespec at_once{0, 0};
    if (!was_pending_)
      ::sigtimedwait(&pipe_, nullptr, &at_once);  // one that was raised meanwhile must not be delivered later
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoBrokenPipe(const NoBrokenPipe&) = delete;
  NoBrokenPipe& operator=(const NoBrokenPipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

class LimitedContext final : public gloo::rendezvous::Context {
 public:
  explicit LimitedContext(const PluginContext& context);

  /// Connects to every other rank of the group.
  void connect(const PluginContext& context);

  void set_deadline(Deadline deadline) noexcept { deadline_ = deadline; }  ///< for the next collective
  void interrupt() noexcept;                                               ///< ends all current and later waits

 private:
  class Transport;
  class Buffer;

  Deadline deadline_;
  Mutex mutex_;
  bool interrupted_ MANIPLE_GUARDED_BY(mutex_) = false;
  /// The buffer that is being waited on, at most one at a time.
  gloo::transport::UnboundBuffer* waiting_ MANIPLE_GUARDED_BY(mutex_) = nullptr;
};

namespace {

using Milliseconds = std::chrono::milliseconds;

/// Gloo adds timeouts to the current time, so "never" must not overflow.
Milliseconds time_until(Deadline deadline) {
  const Deadline::Duration most = std::chrono::hours(24 * 365);
  return std::max(std::chrono::duration_cast<Milliseconds>(std::min(deadline.remaining(), most)), Milliseconds(1));
}

/// Adapts the job's store to Gloo's interface.
class StoreView final : public gloo::rendezvous::Store {
 public:
  explicit StoreView(const PluginContext& context) : context_(context) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    context_.store->set(key, {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    await({key});
    const std::string value = context_.store->get(key, context_.deadline);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { await(keys); }
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override { await(keys); }

 private:
  // In short turns, so that the death of a rank ends the wait.
  void await(const std::vector<std::string>& keys) const {
    for (;;) {
      if (context_.abort->aborted()) throw Aborted("the group failed while it was set up");
      try {
        return context_.store->wait(keys, Deadline::sooner(context_.deadline, Deadline::after(Milliseconds(500))));
      } catch (const Timeout&) {
        if (context_.deadline.expired()) throw;
      }
    }
  }
  const PluginContext& context_;
};

}  // namespace

class LimitedContext::Buffer final : public gloo::transport::UnboundBuffer {
 public:
  Buffer(LimitedContext& owner, std::unique_ptr<gloo::transport::UnboundBuffer> inner)
      : gloo::transport::UnboundBuffer(inner->ptr, inner->size), owner_(owner), inner_(std::move(inner)) {}

  bool waitRecv(int* peer, Milliseconds) override {
    return wait([&](Milliseconds left) { return inner_->waitRecv(peer, left); });
  }
  bool waitSend(int* peer, Milliseconds) override {
    return wait([&](Milliseconds left) { return inner_->waitSend(peer, left); });
  }
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }
  void send(int to, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    inner_->send(to, slot, offset, bytes);
  }
  void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    inner_->recv(from, slot, offset, bytes);
  }
  void recv(std::vector<int> from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    inner_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  template <class Wait>
  bool wait(Wait body) {
    {
      const MutexLock lock(owner_.mutex_);
      if (owner_.interrupted_) throw GivenUp();
      owner_.waiting_ = inner_.get();
    }
    bool complete = false;
    std::exception_ptr error;
    try {
      complete = body(time_until(owner_.deadline_));
    } catch (...) {
      error = std::current_exception();
    }
    const MutexLock lock(owner_.mutex_);
    owner_.waiting_ = nullptr;
    if (complete) return true;
    if (!error || owner_.interrupted_ || owner_.deadline_.expired()) throw GivenUp();
    std::rethrow_exception(error);
  }

  LimitedContext& owner_;
  std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
};

/// Creates the buffers of Gloo's collectives; the pairs belong to the inner context.
class LimitedContext::Transport final : public gloo::transport::Context {
 public:
  Transport(LimitedContext& owner, std::shared_ptr<gloo::transport::Context> inner)
      : gloo::transport::Context(owner.rank, owner.size), owner_(owner), inner_(std::move(inner)) {}

  std::unique_ptr<gloo::transport::Pair>& getPair(int peer) override { return inner_->getPair(peer); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int peer) override { return inner_->createPair(peer); }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data, std::size_t bytes) override {
    return std::make_unique<Buffer>(owner_, inner_->createUnboundBuffer(data, bytes));
  }

 private:
  LimitedContext& owner_;
  std::shared_ptr<gloo::transport::Context> inner_;
};

LimitedContext::LimitedContext(const PluginContext& context)
    : gloo::rendezvous::Context(context.rank, context.size()) {}

void LimitedContext::connect(const PluginContext& context) {
  setTimeout(time_until(context.deadline));
  const auto store = std::make_shared<StoreView>(context);
  auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(context.address.c_str()));
  const auto connect_by = [&](const auto& given) {  // earlier versions of Gloo take a reference
    if constexpr (requires { this->connectFullMesh(given, device); }) {
      this->connectFullMesh(given, device);
    } else {
      this->connectFullMesh(*given, device);
    }
  };
  connect_by(store);
  transportContext_ = std::make_shared<Transport>(*this, transportContext_);
}

void LimitedContext::interrupt() noexcept {
  const MutexLock lock(mutex_);
  interrupted_ = true;
  if (waiting_ == nullptr) return;
  waiting_->abortWaitRecv();
  waiting_->abortWaitSend();
}

namespace {

using ContextPointer = std::shared_ptr<gloo::Context>;

bool can_reduce(const Operation& op) noexcept {
  switch (op.reduce.kind()) {
    case ReduceOp::sum:
    case ReduceOp::product: return op.dtype != DType::float16 && op.dtype != DType::bfloat16;
    case ReduceOp::avg:
    case ReduceOp::premul_sum: return false;
    default: return true;
  }
}

std::uint8_t* bytes(const std::byte* data) { return reinterpret_cast<std::uint8_t*>(const_cast<std::byte*>(data)); }

/// Calls `body` with a null pointer of a type of the element's size.
template <class Body>
void with_element(std::size_t size, Body body) {
  switch (size) {
    case 1: return body(static_cast<std::uint8_t*>(nullptr));
    case 2: return body(static_cast<std::uint16_t*>(nullptr));
    case 4: return body(static_cast<std::uint32_t*>(nullptr));
    default: return body(static_cast<std::uint64_t*>(nullptr));
  }
}

void run_all_reduce(const ContextPointer& context, const Operation& op, PairReduce reduce, std::uint32_t tag) {
  gloo::AllreduceOptions options(context);
  with_element(op.element(), [&]<class T>(T*) {
    if (op.in != op.out) options.setInput(reinterpret_cast<T*>(bytes(op.in)), op.count);
    options.setOutput(reinterpret_cast<T*>(op.out), op.count);
  });
  options.setReduceFunction([&op, reduce](void* into, const void* a, const void* b, std::size_t count) {
    reduce(op.dtype, op.reduce, into, a, b, count);
  });
  options.setTag(tag);
  gloo::allreduce(options);
}

void run_reduce(const ContextPointer& context, const Operation& op, PairReduce reduce, std::uint32_t tag) {
  // Gloo writes partial results to every rank's output, but only the root has an output buffer.
  const bool is_root = context->rank == op.root;
  std::unique_ptr<std::byte[]> own;
  if (!is_root) own = std::make_unique_for_overwrite<std::byte[]>(op.bytes());
  std::byte* const out = is_root ? op.out : own.get();
  if (out != op.in) std::memcpy(out, op.in, op.bytes());
  gloo::ReduceOptions options(context);
  with_element(op.element(), [&]<class T>(T*) { options.setOutput(reinterpret_cast<T*>(out), op.count); });
  options.setRoot(op.root);
  options.setReduceFunction([&op, reduce](void* into, const void* a, const void* b, std::size_t count) {
    reduce(op.dtype, op.reduce, into, a, b, count);
  });
  options.setTag(tag);
  gloo::reduce(options);
}

void run_broadcast(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  gloo::BroadcastOptions options(context);
  options.setOutput(bytes(op.out), op.bytes());
  options.setRoot(op.root);
  options.setTag(tag);
  gloo::broadcast(options);
}

void run_gather(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  gloo::GatherOptions options(context);
  options.setInput(bytes(op.in), op.bytes());
  if (context->rank == op.root) options.setOutput(bytes(op.out), op.bytes() * context->size);
  options.setRoot(op.root);
  options.setTag(tag);
  gloo::gather(options);
}

void run_all_gather(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  const std::size_t element = op.element();
  std::byte* const own = op.out + op.parts.offset(context->rank) * element;
  const bool in_place = own == op.in;
  if (op.parts.equal()) {
    gloo::AllgatherOptions options(context);
    if (!in_place) options.setInput(bytes(op.in), op.bytes());
    options.setOutput(bytes(op.out), op.bytes() * context->size);
    options.setTag(tag);
    return gloo::allgather(options);
  }
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < context->size; ++rank) counts.push_back(op.parts.count(rank) * element);
  gloo::AllgathervOptions options(context);
  if (!in_place && counts[context->rank] > 0) std::memcpy(own, op.in, counts[context->rank]);
  options.setOutput(bytes(op.out), counts);
  options.setTag(tag);
  gloo::allgatherv(options);
}

void run_scatter(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  gloo::ScatterOptions options(context);
  if (context->rank == op.root) {
    std::vector<std::uint8_t*> inputs;
    for (int rank = 0; rank < context->size; ++rank)
      inputs.push_back(bytes(op.in + op.parts.offset(rank) * op.element()));
    options.setInputs(inputs, op.bytes());
  }
  options.setOutput(bytes(op.out), op.bytes());
  options.setRoot(op.root);
  options.setTag(tag);
  gloo::scatter(options);
}

void run_all_to_all(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  const std::size_t all = op.in_parts.total() * op.element();
  gloo::AlltoallOptions options(context);
  options.setInput(bytes(op.in), all);
  options.setOutput(bytes(op.out), all);
  options.setTag(tag);
  gloo::alltoall(options);
}

bool has_collective(const Operation& op) noexcept {
  switch (op.op) {
    case Op::broadcast:
    case Op::barrier: return true;
    case Op::reduce:
    case Op::all_reduce: return can_reduce(op);
    case Op::all_gather: return true;
    case Op::gather:
    case Op::scatter: return op.parts.equal();
    case Op::all_to_all: return op.in_parts.equal() && op.out_parts.equal() && op.in_parts.total() > 0;
    default: return false;  // reduce_scatter: Gloo's version needs memory for the whole input and is not faster
  }
}

/// `tag` must differ between calls. Throws GivenUp and Gloo's exceptions.
void run_collective(const std::shared_ptr<LimitedContext>& context, const Operation& op, PairReduce reduce,
                    std::uint32_t tag) {
  switch (op.op) {
    case Op::broadcast: return run_broadcast(context, op, tag);
    case Op::reduce: return run_reduce(context, op, reduce, tag);
    case Op::all_reduce: return run_all_reduce(context, op, reduce, tag);
    case Op::gather: return run_gather(context, op, tag);
    case Op::all_gather: return run_all_gather(context, op, tag);
    case Op::scatter: return run_scatter(context, op, tag);
    case Op::all_to_all: return run_all_to_all(context, op, tag);
    default: {
      gloo::BarrierOptions options(context);
      options.setTag(tag);
      gloo::barrier(options);
    }
  }
}

class GlooPlugin final : public Plugin {
 public:
  explicit GlooPlugin(const PluginContext& context)
      : context_(context), gloo_(std::make_shared<LimitedContext>(context_)) {
    const NoBrokenPipe guard;  // Gloo's thread starts here
    gloo_->connect(context_);
  }

  std::string_view name() const noexcept override { return "gloo/tcp"; }
  bool can(const Operation& operation) const noexcept override { return has_collective(operation); }

  bool run(const Operation& operation, Deadline deadline) override {
    const NoBrokenPipe guard;
    gloo_->set_deadline(deadline);
    try {
      run_collective(gloo_, operation, context_.pair_reduce, ++tag_);
      return true;
    } catch (const GivenUp&) {
      return false;
    } catch (const gloo::IoException& error) {
      throw PeerLost(std::string("a rank is lost: gloo says ") + error.what(), -1);
    }
  }

  void interrupt(bool /*lost*/) noexcept override { gloo_->interrupt(); }

  // No channels over Gloo: its receives block, which channels must not. Its only transport is TCP, which Maniple has.
  std::unique_ptr<ByteSink> sink(int, Traffic) override { return nullptr; }
  std::unique_ptr<ByteSource> source(int, Traffic) override { return nullptr; }

 private:
  PluginContext context_;
  std::shared_ptr<LimitedContext> gloo_;
  std::uint32_t tag_ = 0;
};

std::unique_ptr<Plugin> make(const PluginContext& context) { return std::make_unique<GlooPlugin>(context); }

constexpr PluginEntry kPlugin = {kPluginAbi, sizeof(Operation), "Gloo, over TCP", make};

}  // namespace

}  // namespace maniple::gloo_plugin

extern "C" MANIPLE_API const maniple::PluginEntry* maniple_plugin_entry() { return &maniple::gloo_plugin::kPlugin; }
