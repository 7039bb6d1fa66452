// MPI as an engine: a communicator for each group. Built once against Open MPI and once against MPICH.
#include "backend/mpi/mpi_channel.h"
#include "backend/mpi/mpi_collectives.h"

namespace maniple::mpi_engine {
namespace {

#ifdef OPEN_MPI
constexpr const char* kName = "openmpi";
constexpr const char* kTitle = "Open MPI";
#else
constexpr const char* kName = "mpich";
constexpr const char* kTitle = "MPICH";
#endif

class MpiCarrier final : public Carrier {
 public:
  explicit MpiCarrier(const CarrierContext& context) : context_(context), communicator_(context_) {}
  ~MpiCarrier() override {
    if (context_.patrol->aborted() || !Runtime::get().usable()) return;  // all are told that the group has failed
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
                          *context_.patrol,    deadline,      context_.most};
    if (run_collective(setting, operation)) return true;
    Runtime::get().desert("a collective of " + context_.group + " was given up");
    return false;
  }

  // Every wait asks the patrol.
  void interrupt() noexcept override { Runtime::get().note_failure(); }

  std::unique_ptr<ByteSink> sink(int rank, Lane lane) override { return make_sink(communicator_.course(rank, lane)); }
  std::unique_ptr<ByteSource> source(int rank, Lane lane) override {
    return make_source(communicator_.course(rank, lane));
  }

 private:
  CarrierContext context_;
  Communicator communicator_;
};

std::unique_ptr<Carrier> make(const CarrierContext& context) { return std::make_unique<MpiCarrier>(context); }

constexpr CarrierPlugin kPlugin = {kCarrierAbi, sizeof(Operation), kTitle, make};

}  // namespace
}  // namespace maniple::mpi_engine

extern "C" const maniple::CarrierPlugin* maniple_carrier_plugin() { return &maniple::mpi_engine::kPlugin; }
