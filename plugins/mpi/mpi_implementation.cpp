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
std::string removed_segment;  // written when the first group is created, read at exit

/// The path of this rank's segment file, from this process's memory map. Checks that the path still leads to the mapped
/// file.
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

// MPICH's launcher sends SIGUSR1 to all ranks when one ends without MPI_Finalize. MPICH handles the signal, too.
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

// UCX, on which MPICH is built, aborts the process when it cannot read the memory of a dead process. It also opens TCP
// connections inside a host, polls the kernel for them every time, and does not use them.
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
  // If MPICH has no handler, the signal belongs to the program.
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
// MPICH's MPI_Finalize sometimes waits forever on UCX (4.0.2 of Debian 12; fixed by pmodels/mpich#6596). Each rank
// first closes its connections in order, which needs replies from the peers, and then waits for the other processes in
// a call that does not reply. So the last rank to close its connections may never get a reply. Connections that a pair
// has opened but not used yet suffice: ranks that end soon after their start, and more ranks than cores.
//
// The mpi backend ends only after all ranks have announced that they are about to exit. No rank needs replies then, so
// connections may be dropped. This function does that: MPICH finds UCX's functions in this library before it finds them
// in UCX.
//
// Returns a request to wait for, or null: done.
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* connection) {
  if (maniple::mpi_plugin::dropping_connections.load()) return nullptr;
  using Disconnect = void* (*)(void*);
  static const auto kOriginal = reinterpret_cast<Disconnect>(::dlsym(RTLD_NEXT, "ucp_disconnect_nb"));
  return kOriginal != nullptr ? kOriginal(connection) : nullptr;
}
#endif
