// What this machine allows: bare programs without an engine (bench/limit_*.cpp).
#include <unistd.h>

#include "bench/system.h"

namespace maniple::bench {
namespace {

class LimitSystem final : public System {
 public:
  std::string name() const override { return "limit"; }
  Role role() const override { return Role::limit; }

  std::string missing(const Site& site) const override {
    const bool there = access((site.libexec + "/limit_core").c_str(), X_OK) == 0;
    return there ? "" : "limits (programs of this project: build with -DMANIPLE_BENCH=ON)";
  }

  std::vector<Order> orders(const Order& wanted, const Site& site) const override {
    Order order = wanted;
    order.backend = name();
    order.transport = "shm";
    order.algorithm.clear();
    if (wanted.op == "limit") return {order};
    const bool done_here = wanted.op == "all_reduce" && wanted.dtype == "float32" && wanted.reduce == "sum";
    const bool comparable = wanted.transport == "auto" || wanted.transport == "shm";
    if (!done_here || !comparable || site.spread() || wanted.ranks < 2) return {};
    return {order};
  }

  std::vector<ChildSpec> process_set(const Order& order, const Site& site) const override {
    ChildSpec spec;
    const std::string program = order.op == "limit" ? "limit_core" : "limit_" + order.buffer;
    spec.name = program;
    spec.argv = {site.libexec + "/" + program, to_json_text(order)};
    return {spec};
  }
};

}  // namespace

std::unique_ptr<System> make_limit_system() { return std::make_unique<LimitSystem>(); }

}  // namespace maniple::bench
