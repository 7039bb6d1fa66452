#include "gpu/nccl_ranks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include <gtest/gtest.h>

namespace maniple::gpu_tests {
namespace {

const DevicePluginEntry& entry() {
  static const DevicePluginEntry* const found = [] {
    const char* const folder = std::getenv("MANIPLE_PLUGINS");
    const std::string path = std::string(folder != nullptr ? folder : MANIPLE_PLUGIN_FOLDER) + "/libmaniple_nccl.so";
    void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    require(library != nullptr, path + ": " + (library == nullptr ? ::dlerror() : ""));
    using Entry = const DevicePluginEntry* (*)();
    const auto get = reinterpret_cast<Entry>(::dlsym(library, kDevicePluginSymbol));
    require(get != nullptr, path + " has no " + kDevicePluginSymbol);
    const DevicePluginEntry* const all = get();
    require(all->abi == kDevicePluginAbi && all->operation == sizeof(Operation), path + " is of another version");
    return all;
  }();
  return *found;
}

void write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count <= 0) return;
    done += static_cast<std::size_t>(count);
  }
}

struct Child {
  pid_t pid = -1;
  int pipe = -1;  // its error text
  std::string text = {};
  bool ended = false;
  int status = 0;
};

/// The process starts here and ends here; what it returned is in its exit status and the pipe.
Child start(const std::function<void()>& body) {
  int ends[2];
  require(::pipe2(ends, O_CLOEXEC) == 0, "pipe");
  std::fflush(nullptr);
  Child child;
  child.pid = ::fork();
  require(child.pid >= 0, "fork");
  if (child.pid == 0) {
    try {
      body();
      std::fflush(nullptr);
      ::_exit(0);
    } catch (const std::exception& error) {
      write_all(ends[1], error.what());
      ::_exit(1);
    }
  }
  ::close(ends[1]);
  child.pipe = ends[0];
  return child;
}

/// Reads what they say until they end. Kills those that have not when the time is over, or some seconds after one has failed.
void finish(std::vector<Child>& children, double limit_s) {
  double end = now_s() + limit_s;
  for (std::size_t left = children.size(); left > 0;) {
    std::vector<pollfd> wanted;
    for (const Child& child : children) wanted.push_back({child.ended ? -1 : child.pipe, POLLIN, 0});
    const bool late = now_s() >= end;
    ::poll(wanted.data(), wanted.size(), late ? 0 : static_cast<int>((end - now_s()) * 1000) + 1);
    for (std::size_t i = 0; i < children.size(); ++i) {
      Child& child = children[i];
      if (child.ended || (wanted[i].revents == 0 && !late)) continue;
      char piece[4096];
      const ssize_t count = wanted[i].revents == 0 ? 0 : ::read(child.pipe, piece, sizeof piece);
      if (count > 0) {
        child.text.append(piece, static_cast<std::size_t>(count));
        continue;
      }
      if (late) {
        ::kill(child.pid, SIGKILL);
        child.text += " [killed: it had not finished in time]";
      }
      ::waitpid(child.pid, &child.status, 0);
      ::close(child.pipe);
      child.ended = true;
      --left;
      if (WIFEXITED(child.status) && WEXITSTATUS(child.status) != 0) end = std::min(end, now_s() + 8);
    }
  }
}

}  // namespace

std::unique_ptr<DevicePlugin> NcclRank::make_one(double limit_s) {
  DeviceContext context;
  context.group = "world";
  context.rank = rank;
  for (int r = 0; r < size; ++r) {
    context.global_ranks.push_back(10 + r);  // others than those of the group, to tell them apart in texts
    context.nodes.push_back(0);
  }
  context.store = store.get();
  context.deadline = Deadline::after(std::chrono::duration<double>(limit_s));
  context.abort = &token;
  return entry().make(context);
}

void NcclRank::report(const std::string& text) const {
  write_all(STDOUT_FILENO, "    rank " + std::to_string(rank) + "/" + std::to_string(size) + ": " + text + "\n");
}

void run_ranks(int size, const std::function<void(NcclRank&)>& body, const RunLimits& limits) {
  const harness::TemporaryDirectory directory;
  std::vector<Child> children;
  for (int r = 0; r < size; ++r) {
    children.push_back(start([&, r] {
      if (!limits.one_host) ::setenv("NCCL_HOSTID", ("host" + std::to_string(r)).c_str(), 1);
      ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
      NcclRank rank;
      rank.rank = r;
      rank.size = size;
      rank.store_path = directory.path() + "/store";
      rank.store = make_file_store(rank.store_path);
      CUDA(::cudaSetDevice(0));
      CUDA(::cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      body(rank);
      rank.plugin.reset();
    }));
  }
  finish(children, limits.seconds);
  for (int r = 0; r < size; ++r) {
    const Child& child = children[static_cast<std::size_t>(r)];
    if (r == limits.killed && WIFSIGNALED(child.status) && WTERMSIG(child.status) == SIGKILL) continue;
    if (child.status == 0) continue;
    ADD_FAILURE() << "rank " << r << " of " << size << " ended with status " << child.status << ": " << child.text;
  }
}

std::string why_not() {
  static const std::string reason = [] {
    std::vector<Child> children = {start([] {
      require(entry().missing().empty(), entry().missing());
      int count = 0;
      require(::cudaGetDeviceCount(&count) == cudaSuccess && count > 0, "no GPU");
    })};
    finish(children, 30);
    return children[0].status == 0 ? std::string() : "needs NCCL and a GPU: " + children[0].text;
  }();
  return reason;
}

std::string error_of(ErrorKind kind, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.kind() == kind) return error.what();
    throw;
  }
  throw std::runtime_error(std::string("no ") + to_string(kind) + " was thrown");
}

bool becomes(double limit_s, const std::function<bool()>& condition) {
  for (const double end = now_s() + limit_s; now_s() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // sleep: the device can only be polled
  }
  return condition();
}

}  // namespace maniple::gpu_tests
