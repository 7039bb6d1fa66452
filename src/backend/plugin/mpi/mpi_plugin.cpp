// MPI as an engine: a communicator for each group. Built once against Open MPI and once against MPICH.
#include "backend/plugin/mpi/mpi_channel.h"
#include "backend/plugin/mpi/mpi_collectives.h"

namespace maniple::mpi_engine {
namespace {

#ifdef OPEN_MPI
constexpr const char* kName = "openmpi";
constexpr const char* kTitle = "Open MPI";
#else
constexpr const char* kName = "mpich";
constexpr const char* kTitle = "MPICH";
#endif

class MpiPlugin final : public Plugin {
 public:
  explicit MpiPlugin(const PluginContext& context) : context_(context), communicator_(context_) {}
  ~MpiPlugin() override {
    if (context_.abort->aborted() || !Runtime::get().usable()) return;  // all are told that the group has failed
    try {
      communicator_.party().say_farewell();
    } catch (const std::exception&) {
      // They will notice at their deadlines.
    }
  }

  std::string_view name() const noexcept override { return kName; }
  bool can(const Operation& operation) const noexcept override { return has_collective(operation); }

  bool run(const Operation& operation, Deadline deadline) override {
    const Setting setting{communicator_.get(), context_.rank, context_.size(),
                          *context_.abort,    deadline,      context_.most};
    if (run_collective(setting, operation)) return true;
    Runtime::get().desert("a collective of " + context_.group + " was given up");
    return false;
  }

  // Every wait asks the abort.
  void interrupt() noexcept override { Runtime::get().note_failure(); }

  std::unique_ptr<ByteSink> sink(int rank, Lane lane) override { return make_sink(communicator_.course(rank, lane)); }
  std::unique_ptr<ByteSource> source(int rank, Lane lane) override {
    return make_source(communicator_.course(rank, lane));
  }

 private:
  PluginContext context_;
  Communicator communicator_;
};

std::unique_ptr<Plugin> make(const PluginContext& context) { return std::make_unique<MpiPlugin>(context); }

constexpr PluginEntry kPlugin = {kPluginAbi, sizeof(Operation), kTitle, make};

}  // namespace
}  // namespace maniple::mpi_engine

extern "C" const maniple::PluginEntry* maniple_plugin_entry() { return &maniple::mpi_engine::kPlugin; }
