#include "plugins/device_ranks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "comm/shm/segment.h"
#include "harness/temporary_directory.h"

namespace maniple::device_test {

struct Board {
  static constexpr int kMost = 64;
  std::atomic<unsigned> arrived[kMost];
  std::atomic<int> pids[kMost];
  std::atomic<bool> may_die[kMost];
  char failures[kMost][1024];
  char steps[kMost][128];
  std::atomic<double> since[kMost];  // of the step
  double start;
};

namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct NeverAborted final : AbortToken {
  bool aborted() const noexcept override { return false; }
};

}  // namespace

/// sockets[maker][receiver]: pairs, of which the maker has the one end and the receiver the other.
struct Rank::Exchange final : DescriptorExchange {
  Exchange(int own, std::vector<int> all, const std::vector<std::vector<int>>& pairs)
      : rank(own), members(std::move(all)), sockets(pairs) {}
  int share(std::string_view, int maker, int descriptor, Deadline deadline) override {
    const int from = members[maker];
    if (from != rank) {
      const int socket = sockets[sockets.size() / 2 + from][rank];
      pollfd readable{socket, POLLIN, 0};  // the sockets block
      require(::poll(&readable, 1, deadline.poll_ms()) == 1, "no descriptor arrived in time");
      return receive_descriptor(socket, deadline).fd.release();
    }
    for (const int other : members) {
      if (other != rank) send_descriptor(sockets[rank][other], descriptor, 0);
    }
    return -1;
  }
  int rank;
  std::vector<int> members;
  const std::vector<std::vector<int>>& sockets;
};

Rank::Rank(int rank, int size, Board& board, std::string store, const std::vector<std::vector<int>>& sockets)
    : rank_(rank),
      size_(size),
      board_(board),
      store_path_(std::move(store)),
      sockets_(sockets),
      store_(make_file_store(store_path_)),
      token_(std::make_unique<NeverAborted>()) {
  void* const library = ::dlopen(MANIPLE_DEVICE_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  require(library != nullptr, library == nullptr ? ::dlerror() : "");
  const auto entry = reinterpret_cast<const DevicePluginEntry* (*)()>(::dlsym(library, kDevicePluginSymbol));
  require(entry != nullptr, "the library has no entry");
  entry_ = entry();
  require(entry_->abi == kDevicePluginAbi && entry_->operation == sizeof(Operation),
          "the library is of another version");
  require(entry_->missing().empty(), entry_->missing());
}

Rank::~Rank() = default;

DeviceContext Rank::make_context(const std::string& group, std::vector<int> members) {
  if (members.empty()) {
    members.resize(size_);
    std::iota(members.begin(), members.end(), 0);
  }
  exchanges_.push_back(std::make_unique<Exchange>(rank_, members, sockets_));
  group_stores_.push_back(make_prefix_store(group, store_));
  DeviceContext context;
  context.group = group;
  context.rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  context.nodes.assign(members.size(), 0);
  context.global_ranks = std::move(members);
  context.store = group_stores_.back().get();
  context.descriptors = exchanges_.back().get();
  context.deadline = Deadline::after(std::chrono::seconds(15));
  context.abort = token_.get();
  return context;
}

std::unique_ptr<DevicePlugin> Rank::make(const std::string& group, std::vector<int> nodes, std::vector<int> members) {
  DeviceContext context = make_context(group, std::move(members));
  if (!nodes.empty()) context.nodes = std::move(nodes);
  return entry_->make(context);
}

RegisteredMemory Rank::allocate(DevicePlugin& plugin, std::size_t bytes) {
  const std::vector<std::size_t> sizes(size_, bytes);
  return plugin.allocate(sizes, ++allocations_, Deadline::after(std::chrono::seconds(30)));
}

void Rank::barrier() {
  const unsigned turn = board_.arrived[rank_].load() + 1;
  board_.arrived[rank_].store(turn);
  for (int i = 0; i < size_; ++i) {
    while (board_.arrived[i].load() < turn && !board_.may_die[i].load()) ::sched_yield();
  }
}

pid_t Rank::pid(int rank) const { return board_.pids[rank].load(); }
void Rank::expect_to_die() const { board_.may_die[rank_] = true; }

void Rank::step(const std::string& what) const {
  std::snprintf(board_.steps[rank_], sizeof board_.steps[rank_], "%s", what.c_str());
  board_.since[rank_] = now_s();
  std::printf("    %7.3f s  rank %d: %s\n", now_s() - board_.start, rank_, what.c_str());
  std::fflush(stdout);
}

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

std::string run_ranks(int size, double seconds, const std::function<void(Rank&)>& body) {
  const harness::TemporaryDirectory folder;
  void* const shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(shared != MAP_FAILED, "mmap failed");
  auto& board = *new (shared) Board{};
  board.start = now_s();
  std::fflush(nullptr);
  std::vector<std::vector<int>> sockets(2 * size, std::vector<int>(size, -1));
  for (int maker = 0; maker < size; ++maker) {
    for (int receiver = 0; receiver < size; ++receiver) {
      int pair[2] = {-1, -1};
      require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair failed");
      sockets[maker][receiver] = pair[0];
      sockets[size + maker][receiver] = pair[1];
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      board.pids[rank] = ::getpid();
      int code = 0;
      try {
        Rank self(rank, size, board, folder.path() + "/store", sockets);
        body(self);
      } catch (const std::exception& error) {
        std::strncpy(board.failures[rank], error.what(), sizeof board.failures[rank] - 1);
        code = 1;
      }
      ::_exit(code);
    }
    board.pids[rank] = child;
  }
  std::string failure;
  int running = size;
  std::vector<bool> ended(size, false);
  Deadline limit = Deadline::after(std::chrono::duration<double>(seconds));
  const auto steps = [&] {
    std::string text;
    for (int rank = 0; rank < size; ++rank) {
      if (board.steps[rank][0] == 0) continue;
      char since[32];
      std::snprintf(since, sizeof since, " for %.1f s", now_s() - board.since[rank].load());
      text += "\n  rank " + std::to_string(rank) + (ended[rank] ? " ended in: " : " is in: ") + board.steps[rank] +
              (ended[rank] ? "" : since);
    }
    return text;
  };
  bool killed = false;
  while (running > 0) {
    for (int rank = 0; rank < size; ++rank) {
      int status = 0;
      if (ended[rank] || ::waitpid(board.pids[rank], &status, WNOHANG) == 0) continue;
      ended[rank] = true;
      --running;
      const bool good = (WIFEXITED(status) && WEXITSTATUS(status) == 0) || (WIFSIGNALED(status) && board.may_die[rank]);
      if (good || !failure.empty()) continue;
      failure = "rank " + std::to_string(rank) + ": " +
                (WIFSIGNALED(status) ? "ended by signal " + std::to_string(WTERMSIG(status)) : board.failures[rank]) +
                steps();
    }
    const bool late = limit.expired();
    if (running > 0 && killed && late) {
      failure += "\n  and SIGKILL does not end:";
      for (int rank = 0; rank < size; ++rank) {
        if (!ended[rank]) failure += " rank " + std::to_string(rank);
      }
      break;
    }
    if (running > 0 && !killed && (late || !failure.empty())) {
      if (failure.empty()) {
        failure = "still running after " + std::to_string(static_cast<int>(seconds)) + " s:";
        for (int rank = 0; rank < size; ++rank) {
          if (!ended[rank]) failure += " rank " + std::to_string(rank);
        }
        failure += steps();
      }
      for (int rank = 0; rank < size; ++rank) {
        if (ended[rank]) continue;
        board.may_die[rank] = true;
        ::kill(board.pids[rank], SIGKILL);
      }
      killed = true;
      limit = Deadline::after(std::chrono::seconds(5));
    }
    ::usleep(2000);  // sleep: several children are waited for, which only polling can do with a limit
  }
  for (const auto& row : sockets) {
    for (const int socket : row) ::close(socket);
  }
  ::munmap(shared, sizeof(Board));
  return failure;
}

}  // namespace maniple::device_test
