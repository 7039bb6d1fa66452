#include "backend/plugin/mpi/mpi_launcher.h"

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>

namespace maniple::mpi_engine {
namespace {

constexpr auto kAmongTheWell = std::chrono::minutes(30);
constexpr auto kUnsure = std::chrono::seconds(10);
constexpr auto kAfterALoss = std::chrono::seconds(2);

#ifdef OPEN_MPI
constexpr const char* kLocalRanks = "OMPI_COMM_WORLD_LOCAL_SIZE";
#else
constexpr const char* kLocalRanks = "MPI_LOCALNRANKS";
std::atomic<bool> loss_told{false};
struct sigaction mpich_action;

// MPICH's launcher sends SIGUSR1 to all ranks when one is gone without MPI_Finalize; MPICH itself handles it too.
void on_loss(int number, siginfo_t* about, void* context) {
  loss_told.store(true);
  if ((mpich_action.sa_flags & SA_SIGINFO) != 0) {
    mpich_action.sa_sigaction(number, about, context);
  } else if (mpich_action.sa_handler != SIG_IGN && mpich_action.sa_handler != SIG_DFL) {
    mpich_action.sa_handler(number);
  }
}
#endif

}  // namespace

bool shares_cores() {
  const char* ranks = std::getenv(kLocalRanks);
  return ranks != nullptr && std::atol(ranks) > ::sysconf(_SC_NPROCESSORS_ONLN);
}

#ifdef OPEN_MPI

void choose_transports() {}
void listen_for_losses() {}
void drop_connections() {}

Deadline::Duration patience_at_exit() {
  const char* recovers = std::getenv("OMPI_MCA_orte_enable_recovery");
  return recovers != nullptr && std::strcmp(recovers, "0") != 0 ? Deadline::Duration(kUnsure)
                                                                : Deadline::Duration(kAmongTheWell);
}

#else

// UCX, on which MPICH is built, aborts the process when it cannot read the memory of one that is gone. And it opens connections
// by TCP inside a host too, asks the kernel for them at every look, and does not use them.
void choose_transports() {
  const char* all = std::getenv("PMI_SIZE");
  const char* here = std::getenv(kLocalRanks);
  const bool one_host = all != nullptr && here != nullptr && std::strcmp(all, here) == 0;
  ::setenv("UCX_TLS", one_host ? "^cma,tcp" : "^cma", 0);
}

void listen_for_losses() {
  struct sigaction own = {};
  own.sa_sigaction = on_loss;
  own.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigemptyset(&own.sa_mask);
  // Where MPICH does not listen, the signal is the program's own.
  if (::sigaction(SIGUSR1, nullptr, &mpich_action) != 0) return;
  if ((mpich_action.sa_flags & SA_SIGINFO) == 0 && mpich_action.sa_handler == SIG_DFL) return;
  ::sigaction(SIGUSR1, &own, nullptr);
}

Deadline::Duration patience_at_exit() {
  return loss_told.load() ? Deadline::Duration(kAfterALoss) : Deadline::Duration(kAmongTheWell);
}

#endif

}  // namespace maniple::mpi_engine
