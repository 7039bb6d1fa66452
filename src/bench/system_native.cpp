// Maniple itself: this program again, as `bench-worker`, one process per rank (or one process of threads for loopback).
#include <fmt/format.h>

#include "backend/plugin/load.h"
#include "bench/system.h"

namespace maniple::bench {
namespace {

class NativeSystem : public System {
 public:
  explicit NativeSystem(bool bare) : bare_(bare) {}

  std::string name() const override { return bare_ ? "bare" : "native"; }
  Role role() const override { return Role::native; }
  std::string missing(const Testbed&) const override { return ""; }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed& testbed) const override {
    const bool sharing =
        requested.transport != "tcp" && (!testbed.several_hosts() || requested.ranks > testbed.network->hosts());
    if (requested.buffer == "registered" && !sharing) return {};  // nobody to share it with: the same as ordinary
    if (requested.buffer == "registered" && requested.op == "barrier") return {};
    if (testbed.several_hosts() && (requested.transport == "shm" || requested.transport == "loopback")) return {};
    WorkItem item = requested;
    item.backend = name();
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    const bool threads = item.transport == "loopback";
    const std::string rendezvous = new_rendezvous(testbed);
    const std::string secret = write_secret(testbed.scratch->new_path("secret"));
    std::vector<ChildSpec> result;
    for (int rank = 0; rank < (threads ? 1 : item.ranks); ++rank) {
      ChildSpec spec;
      spec.name = threads ? "native (ranks as threads)" : fmt::format("{} rank {}", name(), rank);
      spec.argv = {testbed.program, "bench-worker", to_json_text(item), std::to_string(rank), rendezvous};
      spec.environment = {{"MANIPLE_SECRET_FILE", secret}};
      if (bare_) {
        for (const char* knob : {"MANIPLE_CHECKS", "MANIPLE_RECORDER", "MANIPLE_HEARTBEAT"})
          spec.environment.emplace_back(knob, "0");
      }
      if (!threads) spec.core = core_for(rank, item.ranks);
      if (testbed.several_hosts())
        spec.network = testbed.network->descriptor(testbed.network->host_of(rank, item.ranks));
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
  Role role() const override { return Role::plugin; }
  std::string missing(const Testbed&) const override { return missing_plugin("gloo"); }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed&) const override {
    return plugin_work_items(requested, name());
  }
};

}  // namespace

std::unique_ptr<System> make_plugin_gloo_system() { return std::make_unique<PluginGloo>(); }
std::unique_ptr<System> make_native_system() { return std::make_unique<NativeSystem>(false); }
std::unique_ptr<System> make_bare_system() { return std::make_unique<NativeSystem>(true); }

}  // namespace maniple::bench
