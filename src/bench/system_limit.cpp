// What this machine allows: bare programs that use no library (bench/limit_*.cpp).
#include <unistd.h>

#include "bench/system.h"

namespace maniple::bench {
namespace {

class LimitSystem final : public System {
 public:
  std::string name() const override { return "limit"; }
  Role role() const override { return Role::limit; }

  std::string missing(const Testbed& testbed) const override {
    const bool there = access((testbed.libexec + "/limit_core").c_str(), X_OK) == 0;
    return there ? "" : "limits (programs of this project: build with -DMANIPLE_BENCH=ON)";
  }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed& testbed) const override {
    WorkItem item = requested;
    item.backend = name();
    item.transport = "shm";
    item.algorithm.clear();
    if (requested.op == "limit") return {item};
    const bool done_here = requested.op == "all_reduce" && requested.dtype == "float32" && requested.reduce == "sum";
    const bool comparable = requested.transport == "auto" || requested.transport == "shm";
    if (!done_here || !comparable || testbed.several_hosts() || requested.ranks < 2) return {};
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    ChildSpec spec;
    const std::string program = item.op == "limit" ? "limit_core" : "limit_" + item.buffer;
    spec.name = program;
    spec.argv = {testbed.libexec + "/" + program, to_json_text(item)};
    return {spec};
  }
};

}  // namespace

std::unique_ptr<System> make_limit_system() { return std::make_unique<LimitSystem>(); }

}  // namespace maniple::bench
