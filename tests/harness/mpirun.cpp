#include "harness/mpirun.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/messages.h"
#include "harness/start_process.h"

namespace maniple::harness {
namespace {

using bench::InsideNamespace;
using bench::VirtualNetwork;

bool with_mpich() {
  const char* chosen = std::getenv("MANIPLE_MPI");
  return chosen != nullptr && std::strcmp(chosen, "mpich") == 0;
}

sockaddr_un address_in(const std::string& dir) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = dir + "/channel";
  if (path.size() >= sizeof address.sun_path) throw std::runtime_error("too long for a socket: " + path);
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

// Writes the script that replaces mpirun's remote shell between namespaces.
std::string remote_shell(const MpiLaunch& launch) {
  const std::string path = launch.dir + "/remote-shell";
  launch.network->write_remote_shell(path);
  return path;
}

std::string host_list(const MpiLaunch& launch) {
  const int hosts = launch.network->hosts();
  std::vector<int> slots(static_cast<std::size_t>(hosts));
  for (int rank = 0; rank < launch.n; ++rank)
    ++slots[static_cast<std::size_t>(launch.network->host_of(rank, launch.n))];
  std::vector<std::string> words;
  for (int host = 0; host < hosts; ++host)
    words.push_back(fmt::format("{}:{}", VirtualNetwork::address(host), slots[static_cast<std::size_t>(host)]));
  return fmt::format("{}", fmt::join(words, ","));
}

std::vector<std::string> command(const MpiLaunch& launch) {
  std::vector<std::string> words;
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  // A rank that dies must not end the other ranks, because the tests check what those report.
  if (with_mpich()) {
    add({"mpirun.mpich", "-disable-auto-cleanup"});
    if (launch.network)
      add({"-launcher", "ssh", "-launcher-exec", remote_shell(launch), "-iface", "eth0", "-hosts", host_list(launch)});
  } else {
    add({"mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--enable-recovery", "--bind-to", "none"});
    add({"--mca", "orte_tmpdir_base", launch.dir + "/mpi"});
    if (launch.network) {
      add({"--mca", "plm_rsh_agent", remote_shell(launch), "--mca", "plm_rsh_no_tree_spawn", "1"});
      add({"--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0", "--mca", "pml", "ob1", "--mca",
           "btl", "tcp,self", "--host", host_list(launch)});
    } else {
      add({"--mca", "btl",
           "^tcp,ofi"});  // tcp reports errors without a network; ofi sleeps for a second in MPI_Finalize
    }
  }
  add({"-n", std::to_string(launch.n), "env"});
  for (const auto& [name, value] : launch.env) words.push_back(name + "=" + value);
  if (!with_mpich()) add({"OMPI_MCA_orte_enable_recovery=1"});  // Open MPI 5 does not set it for the ranks
  // Whatever their options, MPICH's launcher kills a host's ranks when one of them ends by a signal, and Open MPI 5's
  // launcher when one ends with a status other than 0. A shell in between turns the signal into a status for MPICH, and
  // hides the status from Open MPI. (MPICH's launcher also sends SIGUSR1 to all ranks; MPICH handles it, but it would
  // kill a shell.)
  add({"sh", "-c", with_mpich() ? "trap '' USR1; \"$@\"; exit $?" : "\"$@\"; exit 0", "sh"});
  words.insert(words.end(), launch.program.begin(), launch.program.end());
  return words;
}

UniqueFd listen_in(const std::string& dir) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_in(dir);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket.get(), 64) != 0) {
    throw std::system_error(errno, std::generic_category(), address.sun_path);
  }
  return socket;
}

}  // namespace

MpiRanks start_by_mpirun(const MpiLaunch& launch) {
  ::mkdir((launch.dir + "/mpi").c_str(), 0700);
  const UniqueFd listener = listen_in(launch.dir);
  MpiRanks started;
  started.ranks.resize(static_cast<std::size_t>(launch.n));
  {
    std::optional<InsideNamespace> inside;
    if (launch.network) inside.emplace(launch.network->descriptor(0));
    started.launcher = start_program(command(launch), {}, -1);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(launch.limit_s);
  for (int connected = 0; connected < launch.n;) {
    pollfd waiting{listener.get(), POLLIN, 0};
    ::poll(&waiting, 1, 100);
    const bool ended = ::waitpid(started.launcher, nullptr, WNOHANG) == started.launcher;
    if (ended || std::chrono::steady_clock::now() > end) {
      if (!ended) {
        ::kill(-started.launcher, SIGKILL);
        ::waitpid(started.launcher, nullptr, 0);
      }
      throw std::runtime_error(fmt::format("mpirun: {} of {} ranks connected", connected, launch.n));
    }
    if ((waiting.revents & POLLIN) == 0) continue;
    UniqueFd channel(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    bool gone = false;
    const auto hello = receive_message(channel.get(), true, gone);
    if (!hello) continue;
    MpiRanks::One& one = started.ranks.at(static_cast<std::size_t>(std::stoi(hello->at(0))));
    one.pid = std::stoi(hello->at(1));
    one.channel = std::move(channel);
    ++connected;
  }
  return started;
}

UniqueFd report_to_run(const std::string& dir, int& rank) {
  const char* assigned = std::getenv("OMPI_COMM_WORLD_RANK");
  if (assigned == nullptr) assigned = std::getenv("PMI_RANK");
  rank = assigned != nullptr ? std::atoi(assigned) : 0;
  UniqueFd channel(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_in(dir);
  if (::connect(channel.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) std::_Exit(2);
  send_message(channel.get(), {std::to_string(rank), std::to_string(::getpid())});
  return channel;
}

}  // namespace maniple::harness
