#include "rendezvous/hosted_store.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <thread>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

struct Hosted {
  std::weak_ptr<TcpStoreServer> server;
  Identity identity;
};

std::mutex registry_mutex;
std::map<std::string, Hosted>& registry() {
  static std::map<std::string, Hosted> servers;
  return servers;
}

bool same_job(const Identity& a, const Identity& b) {
  return a.secret.bytes == b.secret.bytes && a.job == b.job && a.generation == b.generation &&
         a.world_size == b.world_size;
}

/// What rank 0 holds: letting go of it retires the server instead of ending it.
std::shared_ptr<TcpStoreServer> handle_of(std::shared_ptr<TcpStoreServer> server) {
  TcpStoreServer* raw = server.get();
  return {raw, [server = std::move(server)](TcpStoreServer*) mutable { TcpStoreServer::retire(std::move(server)); }};
}

}  // namespace

std::shared_ptr<TcpStoreServer> host_store(const Address& address, const Identity& identity, Deadline deadline) {
  constexpr std::chrono::seconds kOwnPortLimit{10};
  const Deadline context = Deadline::sooner(deadline, Deadline::after(kOwnPortLimit));
  const std::string name = address.to_string();
  for (;;) {
    bool ours = false;
    {
      const std::lock_guard lock(registry_mutex);
      auto& servers = registry();
      if (const auto found = servers.find(name); found != servers.end()) {
        ours = true;
        if (auto server = found->second.server.lock(); server && same_job(found->second.identity, identity)) {
          return handle_of(std::move(server));
        }
      }
      try {
        auto server = std::make_shared<TcpStoreServer>(address, identity);
        servers[name] = Hosted{server, identity};
        return handle_of(std::move(server));
      } catch (const SystemError& error) {
        // The port may still be held by an earlier server of this process that is about to go.
        if (error.code() != EADDRINUSE || !ours || context.expired()) throw;
      }
    }
    // sleep: the port is freed by the kernel, which does not announce it
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace maniple
