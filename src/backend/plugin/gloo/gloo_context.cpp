#include "backend/plugin/gloo/gloo_context.h"

#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>

namespace maniple::gloo_plugin {
namespace {

using Milliseconds = std::chrono::milliseconds;

/// Gloo adds its timeouts to the present, so "never" must leave room.
Milliseconds time_until(Deadline deadline) {
  const Deadline::Duration most = std::chrono::hours(24 * 365);
  return std::max(std::chrono::duration_cast<Milliseconds>(std::min(deadline.remaining(), most)), Milliseconds(1));
}

/// Our store, as Gloo sees it.
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
  // In short turns, so that a rank that dies meanwhile ends the wait.
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
      const std::lock_guard lock(owner_.mutex_);
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
    const std::lock_guard lock(owner_.mutex_);
    owner_.waiting_ = nullptr;
    if (complete) return true;
    if (!error || owner_.interrupted_ || owner_.deadline_.expired()) throw GivenUp();
    std::rethrow_exception(error);
  }

  LimitedContext& owner_;
  std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
};

/// Gloo's collectives get their buffers from here; the pairs stay where they are.
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
  StoreView store(context);
  auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(context.address.c_str()));
  connectFullMesh(store, device);
  transportContext_ = std::make_shared<Transport>(*this, transportContext_);
}

void LimitedContext::interrupt() noexcept {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (waiting_ == nullptr) return;
  waiting_->abortWaitRecv();
  waiting_->abortWaitSend();
}

}  // namespace maniple::gloo_plugin
