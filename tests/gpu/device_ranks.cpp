#include "gpu/device_ranks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <stdexcept>

#include "harness/temporary_directory.h"
#include "shm/segment.h"

namespace maniple::device_test {

struct Board {
  static constexpr int kMost = 64;
  std::atomic<unsigned> arrived[kMost];
  std::atomic<int> pids[kMost];
  std::atomic<bool> may_die[kMost];
  char failures[kMost][1024];
};

namespace {

struct NeverAborted final : AbortToken {
  bool aborted() const noexcept override { return false; }
};

}  // namespace

/// sockets[maker][receiver]: pairs, of which the maker has the one end and the receiver the other.
struct Rank::Exchange final : DescriptorExchange {
  Exchange(int own, const std::vector<std::vector<int>>& all) : rank(own), sockets(all) {}
  int share(std::string_view, int maker, int descriptor, Deadline deadline) override {
    const int size = static_cast<int>(sockets.size()) / 2;
    if (maker != rank) {
      const int socket = sockets[size + maker][rank];
      pollfd readable{socket, POLLIN, 0};  // the sockets block
      require(::poll(&readable, 1, deadline.poll_ms()) == 1, "no descriptor arrived in time");
      return receive_descriptor(socket, deadline).fd.release();
    }
    for (int other = 0; other < size; ++other) {
      if (other != rank) send_descriptor(sockets[rank][other], descriptor, 0);
    }
    return -1;
  }
  int rank;
  std::vector<std::vector<int>> sockets;
};

Rank::Rank(int rank, int size, Board& board, std::string store, const std::vector<std::vector<int>>& sockets)
    : rank_(rank),
      size_(size),
      board_(board),
      store_path_(std::move(store)),
      exchange_(std::make_unique<Exchange>(rank, sockets)),
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

std::unique_ptr<DevicePlugin> Rank::make(const std::string& group, std::vector<int> nodes) {
  DeviceContext context;
  context.group = group;
  context.rank = rank_;
  for (int i = 0; i < size_; ++i) context.global_ranks.push_back(i);
  context.nodes = nodes.empty() ? std::vector<int>(size_, 0) : std::move(nodes);
  group_stores_.push_back(make_prefix_store(group, store_));
  context.store = group_stores_.back().get();
  context.descriptors = exchange_.get();
  context.deadline = Deadline::after(std::chrono::seconds(30));
  context.abort = token_.get();
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

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

std::string run_ranks(int size, double seconds, const std::function<void(Rank&)>& body) {
  const harness::TemporaryDirectory folder;
  void* const shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(shared != MAP_FAILED, "mmap failed");
  auto& board = *new (shared) Board{};
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
  const Deadline limit = Deadline::after(std::chrono::duration<double>(seconds));
  while (running > 0) {
    for (int rank = 0; rank < size; ++rank) {
      int status = 0;
      if (ended[rank] || ::waitpid(board.pids[rank], &status, WNOHANG) == 0) continue;
      ended[rank] = true;
      --running;
      const bool good = (WIFEXITED(status) && WEXITSTATUS(status) == 0) || (WIFSIGNALED(status) && board.may_die[rank]);
      if (good || !failure.empty()) continue;
      failure = "rank " + std::to_string(rank) + ": " +
                (WIFSIGNALED(status) ? "ended by signal " + std::to_string(WTERMSIG(status)) : board.failures[rank]);
    }
    if (running > 0 && (limit.expired() || !failure.empty())) {
      if (failure.empty()) failure = "still running after the limit:";
      for (int rank = 0; rank < size; ++rank) {
        if (ended[rank]) continue;
        if (limit.expired()) failure += " rank " + std::to_string(rank);
        board.may_die[rank] = true;
        ::kill(board.pids[rank], SIGKILL);
      }
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
