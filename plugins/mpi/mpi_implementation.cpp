#include "plugins/mpi/mpi_implementation.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

namespace maniple::mpi_plugin {
namespace {

constexpr auto kAllAlive = std::chrono::minutes(30);
constexpr auto kLossUnseen = std::chrono::seconds(10);
constexpr auto kAfterALoss = std::chrono::seconds(2);

#ifdef OPEN_MPI
constexpr const char* kLocalRanks = "OMPI_COMM_WORLD_LOCAL_SIZE";
std::string removed_segment;  // written when the first group is made, read at exit

/// The path of this rank's, by what this process has mapped; and the very file, not another one of its name.
std::string mapped_segment(const std::string& local_rank) {
  std::ifstream maps("/proc/self/maps");
  for (std::string row; std::getline(maps, row);) {
    std::istringstream words(row);
    std::string range, rights, offset, device, path;
    ino_t inode = 0;
    words >> range >> rights >> offset >> device >> inode >> path;
    const bool segment = path.find("/vader_segment.") != std::string::npos ||  // Open MPI 4
                         path.find("/sm_segment.") != std::string::npos;       // Open MPI 5
    if (!segment || !path.ends_with("." + local_rank)) continue;
    struct stat file{};
    if (::stat(path.c_str(), &file) == 0 && file.st_ino == inode && file.st_uid == ::geteuid()) return path;
  }
  return {};
}
#else
constexpr const char* kLocalRanks = "MPI_LOCALNRANKS";
std::atomic<bool> loss_signalled{false};
std::atomic<bool> dropping_connections{false};
struct sigaction mpich_action;

// MPICH's launcher sends SIGUSR1 to all ranks when one is gone without MPI_Finalize; MPICH itself handles it too.
void on_loss(int number, siginfo_t* about, void* context) {
  loss_signalled.store(true);
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
void watch_for_losses() {}
void drop_connections() {}

void remove_segment_file() {
  const char* local_rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  if (local_rank == nullptr) return;
  const std::string path = mapped_segment(local_rank);
  if (!path.empty() && ::unlink(path.c_str()) == 0) removed_segment = path;
}

void restore_segment_file() {
  if (removed_segment.empty()) return;
  const int file = ::open(removed_segment.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (file >= 0) ::close(file);
}

Deadline::Duration exit_limit() {
  const char* recovers = std::getenv("OMPI_MCA_orte_enable_recovery");
  return recovers != nullptr && std::strcmp(recovers, "0") != 0 ? Deadline::Duration(kLossUnseen)
                                                                : Deadline::Duration(kAllAlive);
}

#else

// UCX, on which MPICH is built, aborts the process when it cannot read the memory of one that is gone. And it opens
// connections by TCP inside a host too, asks the kernel for them at every poll, and does not use them.
void choose_transports() {
  const char* all = std::getenv("PMI_SIZE");
  const char* here = std::getenv(kLocalRanks);
  const bool one_host = all != nullptr && here != nullptr && std::strcmp(all, here) == 0;
  ::setenv("UCX_TLS", one_host ? "^cma,tcp" : "^cma", 0);
}

void watch_for_losses() {
  struct sigaction own = {};
  own.sa_sigaction = on_loss;
  own.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigemptyset(&own.sa_mask);
  // Where MPICH has no handler, the signal is the program's own.
  if (::sigaction(SIGUSR1, nullptr, &mpich_action) != 0) return;
  if ((mpich_action.sa_flags & SA_SIGINFO) == 0 && mpich_action.sa_handler == SIG_DFL) return;
  ::sigaction(SIGUSR1, &own, nullptr);
}

Deadline::Duration exit_limit() {
  return loss_signalled.load() ? Deadline::Duration(kAfterALoss) : Deadline::Duration(kAllAlive);
}

void drop_connections() { dropping_connections.store(true); }
void remove_segment_file() {}
void restore_segment_file() {}

#endif

}  // namespace maniple::mpi_plugin

#ifndef OPEN_MPI
// MPICH's MPI_Finalize sometimes waits for ever when it runs on UCX (4.0.2 of Debian 12; pmodels/mpich#6596 fixes it):
// each rank first closes its connections in order, which takes answers of the other side, and then waits for the other
// processes in a call that answers none. So whoever closes last may never be answered. Connections that a pair has
// opened but not used yet are enough for it: ranks that end soon after they were started, more of them than there are
// cores.
//
// The mpi backend ends only after all ranks have said that they are about to exit. No rank needs an answer then, and
// connections may be dropped. That is what happens here: MPICH looks for the functions of UCX in this library before it
// looks in UCX.
//
// Returns a request to wait for, or null: done.
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* connection) {
  if (maniple::mpi_plugin::dropping_connections.load()) return nullptr;
  using Disconnect = void* (*)(void*);
  static const auto kOriginal = reinterpret_cast<Disconnect>(::dlsym(RTLD_NEXT, "ucp_disconnect_nb"));
  return kOriginal != nullptr ? kOriginal(connection) : nullptr;
}
#endif
