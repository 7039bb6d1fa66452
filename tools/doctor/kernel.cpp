#include "tools/doctor/checks.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>

#include <fmt/format.h>

#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"
#include "comm/shm/peer_memory.h"
#include "comm/shm/segment.h"

namespace maniple::doctor {
namespace {

constexpr std::size_t kProbeBytes = 1 << 20;
constexpr std::uint64_t kComfortableShm = std::uint64_t{1} << 30;

UniqueFd try_memfd(std::string& problem) {
  UniqueFd file(::memfd_create("maniple-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) {
    problem = "memfd_create: " + errno_text(errno);
  } else if (::ftruncate(file.get(), kProbeBytes) != 0) {
    problem = "ftruncate: " + errno_text(errno);
  } else {
    void* memory = ::mmap(nullptr, kProbeBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) {
      problem = "mmap: " + errno_text(errno);
    } else {
      std::memset(memory, 1, kProbeBytes);
      ::munmap(memory, kProbeBytes);
    }
  }
  return file;
}

std::string try_passing(int fd) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return "socketpair: " + errno_text(errno);
  const UniqueFd one(ends[0]), other(ends[1]);
  return problem_in([&] {
    send_descriptor(one.get(), fd, 0);
    receive_descriptor(other.get(), Deadline::after(std::chrono::seconds(5)));
  });
}

// One child allows reading, and a second child reads its memory, as ranks do.
bool try_reading() {
  void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int ready[2];
  if (page == MAP_FAILED || ::pipe2(ready, O_CLOEXEC) != 0) return false;
  auto* const identity = static_cast<PeerMemory::Identity*>(page);
  const pid_t shown = ::fork();
  if (shown == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    PeerMemory memory(1);
    *identity = memory.identify();
    if (::write(ready[1], "", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  ::close(ready[1]);
  char byte = 0;
  const bool is_ready = shown > 0 && ::read(ready[0], &byte, 1) == 1;
  ::close(ready[0]);
  const pid_t reader = is_ready ? ::fork() : -1;
  if (reader == 0) {
    std::uint64_t word = 0;
    ::_exit(PeerMemory(1).read(0, *identity, &word, identity->address, sizeof word) ? 0 : 1);
  }
  int status = 1;
  if (reader > 0) ::waitpid(reader, &status, 0);
  if (shown > 0) {
    ::kill(shown, SIGKILL);
    ::waitpid(shown, nullptr, 0);
  }
  ::munmap(page, 4096);
  return reader > 0 && status == 0;
}

constexpr std::int64_t kStartOf2024 = 1'704'067'200;
constexpr double kSlowReadNs = 500;  // slower than this, the clock needs a system call instead of a register read

}  // namespace

// --- sharing ---

Findings judge(const SharingFacts& facts) {
  Findings findings;
  if (!facts.memfd_problem.empty()) {
    findings.push_back({Verdict::fail, "shared memory cannot be created: " + facts.memfd_problem,
                        "allow memfd_create and mmap in the seccomp profile, or use MANIPLE_TRANSPORT=tcp"});
  } else if (!facts.pass_problem.empty()) {
    findings.push_back({Verdict::fail, "descriptors cannot be passed between processes: " + facts.pass_problem,
                        "allow Unix sockets in the sandbox, or use MANIPLE_TRANSPORT=tcp"});
  } else {
    findings.push_back({Verdict::ok, "shared memory (memfd) can be created and passed to other ranks"});
  }
  if (facts.reads_peers) {
    findings.push_back({Verdict::ok, "ranks can read each other's memory"});
  } else {
    findings.push_back({Verdict::warn,
                        "ranks cannot read each other's memory: operations that move large buffers copy twice",
                        "allow process_vm_readv in the seccomp profile, and sysctl kernel.yama.ptrace_scope=1 or 0"});
  }
  if (!facts.dev_shm_bytes) {
    findings.push_back({Verdict::warn, "/dev/shm is missing; Maniple does not need it, Open MPI and NCCL do",
                        "mount -t tmpfs tmpfs /dev/shm"});
  } else if (*facts.dev_shm_bytes < kComfortableShm) {
    findings.push_back({Verdict::warn,
                        fmt::format("/dev/shm has {} free; Maniple does not need it, Open MPI and NCCL do",
                                    size_text(static_cast<double>(*facts.dev_shm_bytes))),
                        "start the container with --shm-size=8g or --ipc=host"});
  } else {
    findings.push_back(
        {Verdict::ok, fmt::format("/dev/shm has {} free", size_text(static_cast<double>(*facts.dev_shm_bytes)))});
  }
  return findings;
}

SharingFacts inspect_sharing() {
  SharingFacts facts;
  const UniqueFd file = try_memfd(facts.memfd_problem);
  if (facts.memfd_problem.empty()) facts.pass_problem = try_passing(file.get());
  facts.reads_peers = try_reading();
  struct statvfs space{};
  if (::statvfs("/dev/shm", &space) == 0) facts.dev_shm_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  return facts;
}

// --- clock ---

Findings judge(const ClockFacts& facts) {
  Findings findings;
  if (!facts.goes_forward) {
    findings.push_back({Verdict::fail, "the monotonic clock went backwards",
                        "use another clock source: /sys/devices/system/clocksource"});
  }
  if (facts.now < kStartOf2024) {
    findings.push_back({Verdict::warn, "the date is in the past: logs and certificates will be wrong",
                        "set it: timedatectl set-ntp true"});
  }
  if (facts.read_ns > kSlowReadNs) {
    findings.push_back({Verdict::warn,
                        fmt::format("reading the clock takes {:.0f} ns (source {})", facts.read_ns, facts.source),
                        "use tsc: echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"});
  }
  if (findings.empty()) {
    findings.push_back(
        {Verdict::ok,
         fmt::format("clock {}reads in {:.0f} ns{}", facts.source.empty() ? "" : facts.source + " ", facts.read_ns,
                     facts.synchronised ? ", synchronised" : "; not synchronised, which only logs notice")});
  }
  return findings;
}

ClockFacts inspect_clock() {
  ClockFacts facts;
  facts.now = std::time(nullptr);
  timex state{};
  facts.synchronised = ::adjtimex(&state) >= 0 && (state.status & STA_UNSYNC) == 0;
  facts.source = read_small_file("/sys/devices/system/clocksource/clocksource0/current_clocksource").value_or("");
  constexpr int kReads = 2000;
  // The best of a few rounds, because other processes use the cores, too.
  facts.read_ns = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    auto last = begin;
    for (int i = 0; i < kReads; ++i) {
      const auto now = std::chrono::steady_clock::now();
      facts.goes_forward = facts.goes_forward && now >= last;
      last = now;
    }
    facts.read_ns = std::min(facts.read_ns, std::chrono::duration<double, std::nano>(last - begin).count() / kReads);
  }
  return facts;
}

}  // namespace maniple::doctor
