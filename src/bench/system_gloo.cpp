// Gloo, through bench/peer_gloo.cpp; its ranks are started by us.
#include <unistd.h>

#include <filesystem>

#include <fmt/format.h>

#include "bench/system.h"

namespace maniple::bench {
namespace {

class GlooSystem final : public System {
 public:
  std::string name() const override { return "gloo"; }
  Role role() const override { return Role::peer; }

  std::string missing(const Site& site) const override {
    return access(program(site).c_str(), X_OK) == 0 ? "" : "Gloo (package libgloo-dev)";
  }

  std::vector<Order> orders(const Order& wanted, const Site&) const override {
    const bool done =
        wanted.op == "all_reduce" || wanted.op == "broadcast" || wanted.op == "all_gather" || wanted.op == "barrier";
    if (!done || wanted.dtype != "float32" || wanted.reduce != "sum") return {};
    if (wanted.transport == "loopback") return {};
    Order order = wanted;
    order.buffer = "ordinary";  // it knows no other, nor our algorithms
    order.algorithm.clear();
    order.backend = name();
    order.transport = "tcp";
    return {order};
  }

  std::vector<ChildSpec> process_set(const Order& order, const Site& site) const override {
    const std::string store_directory = site.scratch->fresh("gloo");
    std::filesystem::create_directory(store_directory);
    std::vector<ChildSpec> result;
    for (int rank = 0; rank < order.ranks; ++rank) {
      ChildSpec spec;
      spec.name = fmt::format("gloo rank {}", rank);
      const int host = site.spread() ? site.hosts->host_of(rank, order.ranks) : 0;
      const std::string address = site.spread() ? site.hosts->address(host) : "127.0.0.1";
      spec.argv = {program(site), to_json_text(order), std::to_string(rank), store_directory, address};
      spec.core = core_for(rank, order.ranks);
      if (site.spread()) spec.network_of = site.hosts->network(host);
      result.push_back(std::move(spec));
    }
    return result;
  }

 private:
  static std::string program(const Site& site) { return site.libexec + "/peer_gloo"; }
};

}  // namespace

std::unique_ptr<System> make_gloo_system() { return std::make_unique<GlooSystem>(); }

}  // namespace maniple::bench
