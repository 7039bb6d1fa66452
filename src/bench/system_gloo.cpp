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

  std::string missing(const Testbed& testbed) const override {
    return access(program(testbed).c_str(), X_OK) == 0 ? "" : "Gloo (package libgloo-dev)";
  }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed&) const override {
    const bool done = requested.op == "all_reduce" || requested.op == "broadcast" || requested.op == "all_gather" ||
                      requested.op == "barrier";
    if (!done || requested.dtype != "float32" || requested.reduce != "sum") return {};
    if (requested.transport == "loopback") return {};
    WorkItem item = requested;
    item.buffer = "ordinary";  // it knows no other, nor our algorithms
    item.algorithm.clear();
    item.backend = name();
    item.transport = "tcp";
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    const std::string store_directory = testbed.scratch->new_path("gloo");
    std::filesystem::create_directory(store_directory);
    std::vector<ChildSpec> result;
    for (int rank = 0; rank < item.ranks; ++rank) {
      ChildSpec spec;
      spec.name = fmt::format("gloo rank {}", rank);
      const int host = testbed.several_hosts() ? testbed.network->host_of(rank, item.ranks) : 0;
      const std::string address = testbed.several_hosts() ? testbed.network->address(host) : "127.0.0.1";
      spec.argv = {program(testbed), to_json_text(item), std::to_string(rank), store_directory, address};
      spec.core = core_for(rank, item.ranks);
      if (testbed.several_hosts()) spec.network = testbed.network->descriptor(host);
      result.push_back(std::move(spec));
    }
    return result;
  }

 private:
  static std::string program(const Testbed& testbed) { return testbed.libexec + "/peer_gloo"; }
};

}  // namespace

std::unique_ptr<System> make_gloo_system() { return std::make_unique<GlooSystem>(); }

}  // namespace maniple::bench
