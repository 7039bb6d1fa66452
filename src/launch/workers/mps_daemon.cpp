#include "launch/workers/mps_daemon.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/base/system_error.h"
#include "launch/process/process_table.h"
#include "launch/process/program.h"
#include "launch/process/start.h"

namespace maniple::launch {
namespace {

constexpr const char* kProgram = "nvidia-cuda-mps-control";
constexpr const char* kPipeVariable = "CUDA_MPS_PIPE_DIRECTORY";
constexpr const char* kLogVariable = "CUDA_MPS_LOG_DIRECTORY";
constexpr const char* kDevicesVariable = "CUDA_VISIBLE_DEVICES";
constexpr const char* kWithout = "without --share-gpu the ranks share a GPU in time slices";
constexpr std::chrono::seconds kStartLimit{10};
constexpr std::chrono::seconds kQuitLimit{3};
constexpr std::chrono::seconds kSignalLimit{1};
constexpr int kLookMs = 5;  // polling interval: a process may not be a child, or is one child of several

// For sh: $0 is the program, $1 the file for its output.
constexpr const char* kStartDaemon = "exec \"$0\" -d >>\"$1\" 2>&1";
constexpr const char* kAsk = "echo get_server_list | \"$0\" >/dev/null 2>&1";
constexpr const char* kQuit = "echo quit | \"$0\" >/dev/null 2>&1";

std::string path_variable() {
  const char* path = std::getenv("PATH");
  return path != nullptr ? path : "/usr/bin:/bin";
}

std::string last_line_of(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

/// Returns true as soon as the job must end, false after a pause. `control` is the agent's end of the socket to the
/// supervisor; its bytes are left for the agent. -1: none.
bool pause_unless_ended(int control) {
  pollfd state{control, POLLIN, 0};
  if (::poll(&state, 1, kLookMs) <= 0) return false;
  if (signal_to_end(control) != 0) return true;
  ::poll(nullptr, 0, kLookMs);
  return false;
}

}  // namespace

int signal_to_end(int control) {
  unsigned char bytes[64];
  const ssize_t got = ::recv(control, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
  for (ssize_t i = 0; i < got; ++i) {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      if (bytes[i] == signal) return signal;
    }
  }
  pollfd state{control, 0, 0};  // POLLHUP is reported even while unread bytes remain
  return ::poll(&state, 1, 0) > 0 && (state.revents & POLLHUP) != 0 ? SIGKILL : 0;
}

std::string mps_parent_folder(const std::string& temporary) {
  constexpr std::size_t kInside = sizeof "/maniple-mps-XXXXXX/pipe/nvidia-cuda-mps-control.pid" + 16;
  return temporary.size() + kInside <= sizeof(sockaddr_un{}.sun_path) ? temporary : "/tmp";
}

std::string renumbered_devices(const std::string& visible) {
  std::string numbers;
  int count = 0;
  for (std::size_t begin = 0; begin <= visible.size();) {
    const auto end = std::min(visible.find(',', begin), visible.size());
    const std::string name = visible.substr(begin, end - begin);
    if (name.empty() || name.find_first_not_of("0123456789") != std::string::npos) return visible;
    numbers += fmt::format("{}{}", count == 0 ? "" : ",", count);
    ++count;
    begin = end + 1;
  }
  return numbers;
}

MpsDaemon::MpsDaemon() {
  try {
    program_ = find_program({kProgram}, path_variable()).path;
  } catch (const ProgramError&) {
    throw InvalidArgument(fmt::format(
        "--share-gpu: {} is not on PATH; it is a part of NVIDIA's driver (package nvidia-cuda-mps of Debian, "
        "nvidia-compute-utils-VERSION of Ubuntu); {}",
        kProgram, kWithout));
  }
  folder_ = mps_parent_folder(temporary_folder()) + "/maniple-mps-XXXXXX";
  if (::mkdtemp(folder_.data()) == nullptr) throw_system_error("--share-gpu: mkdtemp " + folder_);
  for (const char* part : {"/pipe", "/log"}) {
    if (::mkdir((folder_ + part).c_str(), 0700) != 0) throw_system_error("--share-gpu: mkdir " + folder_ + part);
  }
  environment_ = own_environment();
  set_variable(environment_, kPipeVariable, folder_ + "/pipe");
  set_variable(environment_, kLogVariable, folder_ + "/log");
}

MpsDaemon::~MpsDaemon() { remove_folder(); }

void MpsDaemon::remove_folder() const noexcept { remove_tree(folder_); }

/// The script's exit code; nullopt when the script was ended here: at the deadline, by a signal, or because the job
/// must end.
std::optional<int> MpsDaemon::run(const std::string& script, Deadline deadline, int control) const {
  const Program shell{.path = "/bin/sh", .argv = {"sh", "-c", script, program_, folder_ + "/output"}};
  // A session of its own, so that all processes the script starts can be ended with it.
  const pid_t pid =
      start_process({.program = &shell, .environment = &environment_, .output = StartOutput::inherited}).pid;
  for (;;) {
    int status = 0;
    const pid_t ended = ::waitpid(pid, &status, WNOHANG);
    if (ended == pid) return WIFEXITED(status) ? std::optional<int>(WEXITSTATUS(status)) : std::nullopt;
    if (ended < 0 && errno != EINTR) return std::nullopt;
    if (!pause_unless_ended(control) && !deadline.expired()) continue;
    ::kill(-pid, SIGKILL);
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return std::nullopt;
  }
}

void MpsDaemon::start(int control) {
  const Deadline deadline = Deadline::after(kStartLimit);
  const auto fail = [&](const std::string& what) {
    const bool cancelled = pause_unless_ended(control);
    const std::string line = last_line();
    end_descendants(kQuitLimit);
    remove_folder();
    if (cancelled) throw Aborted("the job was ended before its MPS daemon was ready");
    throw SystemError(
        fmt::format("--share-gpu: {} -d {}{}{}; look at nvidia-smi and the driver's state (maniple doctor); {}",
                    program_, what, line.empty() ? "" : ": ", line, kWithout),
        0);
  };
  const std::string late = fmt::format("did not answer within {} s", kStartLimit.count());
  const std::optional<int> code = run(kStartDaemon, deadline, control);
  if (!code) fail(deadline.expired() ? late : "was killed");
  if (*code != 0) fail(fmt::format("failed with exit code {}", *code));
  while (run(kAsk, deadline, control) != 0) {
    if (descendants().empty()) fail("has ended");
    if (deadline.expired()) fail(late);
    if (pause_unless_ended(control)) fail("was interrupted");
  }
  for (const pid_t pid : descendants()) {
    if (const auto began = start_of_process(pid)) daemon_.push_back({pid, *began});
  }
  set_variables();
}

void MpsDaemon::set_variables() const {
  ::setenv(kPipeVariable, (folder_ + "/pipe").c_str(), 1);
  ::setenv(kLogVariable, (folder_ + "/log").c_str(), 1);
  if (const char* visible = std::getenv(kDevicesVariable))
    ::setenv(kDevicesVariable, renumbered_devices(visible).c_str(), 1);
}

/// The last line that the daemon printed, or else wrote to its log.
std::string MpsDaemon::last_line() const {
  const std::string printed = last_line_of(file_text(folder_ + "/output"));
  return printed.empty() ? last_line_of(file_text(folder_ + "/log/control.log")) : printed;
}

/// The daemon, if it runs, and its servers.
std::vector<MpsDaemon::Process> MpsDaemon::family() const {
  std::vector<Process> found;
  for (const Process& daemon : daemon_) {
    if (start_of_process(daemon.pid) != daemon.start) continue;
    found.push_back(daemon);
    for (const pid_t pid : descendants_of(daemon.pid)) {
      if (const auto began = start_of_process(pid)) found.push_back({pid, *began});
    }
  }
  return found;
}

bool MpsDaemon::await_end(const std::vector<Process>& processes, Deadline deadline) const {
  for (;;) {
    const bool gone = std::all_of(processes.begin(), processes.end(),
                                  [](const Process& one) { return start_of_process(one.pid) != one.start; });
    if (gone || deadline.expired()) return gone;
    pause_unless_ended(-1);
  }
}

void MpsDaemon::stop() noexcept try {
  const std::vector<Process> running = family();
  if (!running.empty()) {
    const Deadline deadline = Deadline::after(kQuitLimit);
    bool gone = run(kQuit, deadline, -1) == 0 && await_end(running, deadline);
    for (const int signal : {SIGTERM, SIGKILL}) {
      if (gone) break;
      for (const Process& one : running) {
        if (start_of_process(one.pid) == one.start) ask_to_end(one.pid, signal);
      }
      gone = await_end(running, Deadline::after(kSignalLimit));
    }
  }
  remove_folder();
} catch (const std::exception& error) {
  fmt::print(stderr, "maniple: stopping {}: {}\n", kProgram, error.what());
  remove_folder();
}

}  // namespace maniple::launch
