// Maniple itself: this program again, as `bench-worker`, one process per rank (or one process of threads for loopback).
#include <fcntl.h>
#include <sys/random.h>

#include <array>

#include <fmt/format.h>

#include "backend/plugin/load.h"
#include "base/system_error.h"
#include "bench/system.h"

namespace maniple::bench {
namespace {

constexpr int kSecretBytes = 32;
constexpr int kPort = 29400;  // in namespaces of our own every port is free

}  // namespace

std::string write_secret(const std::string& path) {
  std::array<unsigned char, kSecretBytes> secret;
  if (getrandom(secret.data(), secret.size(), 0) != kSecretBytes) throw_system_error("getrandom");
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file || write(file.get(), secret.data(), secret.size()) != kSecretBytes) throw_system_error("write " + path);
  return path;
}

std::string fresh_rendezvous(const Site& site) {
  return site.spread() ? fmt::format("tcp://{}:{}", site.hosts->address(0), kPort) : "file://" + site.scratch->fresh("rendezvous");
}

namespace {

class NativeSystem : public System {
 public:
  explicit NativeSystem(bool bare) : bare_(bare) {}

  std::string name() const override { return bare_ ? "bare" : "native"; }
  Role role() const override { return Role::native; }
  std::string missing(const Site&) const override { return ""; }

  std::vector<Order> orders(const Order& wanted, const Site& site) const override {
    const bool sharing = wanted.transport != "tcp" && (!site.spread() || wanted.ranks > site.hosts->count());
    if (wanted.buffer == "registered" && !sharing) return {};  // nobody to share it with: the same as ordinary
    if (wanted.buffer == "registered" && wanted.op == "barrier") return {};
    if (site.spread() && (wanted.transport == "shm" || wanted.transport == "loopback")) return {};
    Order order = wanted;
    order.backend = name();
    return {order};
  }

  std::vector<ChildSpec> process_set(const Order& order, const Site& site) const override {
    const bool threads = order.transport == "loopback";
    const std::string rendezvous = fresh_rendezvous(site);
    const std::string secret = write_secret(site.scratch->fresh("secret"));
    std::vector<ChildSpec> result;
    for (int rank = 0; rank < (threads ? 1 : order.ranks); ++rank) {
      ChildSpec spec;
      spec.name = threads ? "native (ranks as threads)" : fmt::format("{} rank {}", name(), rank);
      spec.argv = {site.program, "bench-worker", to_json_text(order), std::to_string(rank), rendezvous};
      spec.environment = {{"MANIPLE_SECRET_FILE", secret}};
      if (bare_) {
        for (const char* knob : {"MANIPLE_CHECKS", "MANIPLE_RECORDER", "MANIPLE_HEARTBEAT"})
          spec.environment.emplace_back(knob, "0");
      }
      if (!threads) spec.core = core_for(rank, order.ranks);
      if (site.spread()) spec.network_of = site.hosts->network(site.hosts->host_of(rank, order.ranks));
      result.push_back(std::move(spec));
    }
    return result;
  }

 private:
  bool bare_;
};

/// The same program and ranks, over Gloo.
class PluginGloo final : public NativeSystem {
 public:
  PluginGloo() : NativeSystem(false) {}
  std::string name() const override { return "maniple-gloo"; }
  Role role() const override { return Role::engine; }
  std::string missing(const Site&) const override { return missing_plugin("gloo"); }

  std::vector<Order> orders(const Order& wanted, const Site&) const override {
    return plugin_work_items(wanted, name());
  }
};

}  // namespace

std::unique_ptr<System> make_plugin_gloo_system() { return std::make_unique<PluginGloo>(); }
std::unique_ptr<System> make_native_system() { return std::make_unique<NativeSystem>(false); }
std::unique_ptr<System> make_bare_system() { return std::make_unique<NativeSystem>(true); }

}  // namespace maniple::bench
