#include "comm/transport/mesh_world.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <numeric>
#include <thread>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/transport/ring_channel.h"

namespace maniple::test {

void Notification::notify() {
  {
    const std::lock_guard lock(mutex_);
    ++count_;
  }
  changed_.notify_all();
}

void Notification::wait(std::uint64_t& seen, Deadline deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline.when(), [&] { return count_ != seen; });
  seen = count_;
}

Board::Board(int ranks) {
  for (int rank = 0; rank < ranks; ++rank) arrivals_.emplace_back(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

void Board::put(int from, int to, const std::string& topic, SecureConnection socket) {
  const std::lock_guard lock(mutex_);
  waiting_[{from, to, topic}] = std::move(socket);
  ::eventfd_write(arrivals_[static_cast<std::size_t>(to)].get(), 1);
}

SecureConnection Board::take(int from, int to, const std::string& topic) {
  const std::lock_guard lock(mutex_);
  eventfd_t count = 0;
  ::eventfd_read(arrivals_[static_cast<std::size_t>(to)].get(), &count);
  const auto found = waiting_.find({from, to, topic});
  if (found == waiting_.end()) return {};
  SecureConnection socket = std::move(found->second);
  waiting_.erase(found);
  return socket;
}

std::pair<UniqueFd, UniqueFd> tcp_pair() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), generic, length) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &length) != 0) {
    throw_system_error("listen on loopback");
  }
  UniqueFd dialled(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(dialled.get(), generic, length) != 0) throw_system_error("connect");
  UniqueFd accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!accepted) throw_system_error("accept");
  return {std::move(dialled), std::move(accepted)};
}

SecureConnection TestConnector::dial(int global_rank, const std::string& topic, Deadline, const AbortSignal&) {
  auto [dialled, accepted] = tcp_pair();
  const auto keys = [&](bool dialler) -> std::optional<ConnectionKeys> {
    if (!sealed_) return std::nullopt;
    const TrafficSecret secret{1};
    const Cipher cipher = rank_ % 2 == 0 ? Cipher::aes_256_gcm : Cipher::chacha20_poly1305;
    return derive_keys(cipher, secret, topic + std::to_string(rank_) + " to " + std::to_string(global_rank), dialler);
  };
  board_.put(rank_, global_rank, topic, SecureConnection(std::move(accepted), keys(false)));
  return SecureConnection(std::move(dialled), keys(true));
}

struct MeshWorld::RingMemory {
  explicit RingMemory(std::size_t capacity)
      : size(ring_bytes(capacity)), memory(static_cast<std::byte*>(std::aligned_alloc(64, size)), &std::free) {
    std::fill_n(memory.get(), size, std::byte{});
  }
  std::size_t size;
  std::unique_ptr<std::byte, void (*)(void*)> memory;
  std::span<std::byte> span() const { return {memory.get(), size}; }
};

MeshWorld::MeshWorld(const WorldOptions& options)
    : options_(options),
      board_(options.first_global_rank + options.size),
      members_(static_cast<std::size_t>(options.size)) {
  std::iota(members_.begin(), members_.end(), 0);
  const auto n = static_cast<std::size_t>(options_.size);
  if (options_.channel == Channel::ring) {
    for (std::size_t i = 0; i < n * n; ++i) rings_.push_back(std::make_unique<RingMemory>(options_.ring_capacity));
  }
  for (int rank = 0; rank < options_.size; ++rank) {
    connectors_.push_back(std::make_unique<TestConnector>(board_, options_.first_global_rank + rank,
                                                          options_.channel == Channel::sealed));
    aborts_.push_back(std::make_unique<AbortSignal>());
    MeshOptions mesh;
    mesh.topic = "test";
    mesh.rank = rank;
    for (int i = 0; i < options_.size; ++i) mesh.global_ranks.push_back(options_.first_global_rank + i);
    mesh.connector = connectors_.back().get();
    mesh.abort = aborts_.back().get();
    mesh.streams = options_.streams;
    if (options_.channel == Channel::ring) {
      const auto own = static_cast<std::size_t>(rank);
      const auto ring = [this, n](std::size_t from, std::size_t to) { return rings_[from * n + to]->span(); };
      const auto notify = [this] { notification_.notify(); };
      mesh.local_sink = [=](int peer) { return make_ring_sink(ring(own, static_cast<std::size_t>(peer)), notify); };
      mesh.local_source = [=](int peer) { return make_ring_source(ring(static_cast<std::size_t>(peer), own), notify); };
      mesh.local_wait = [this, seen = std::uint64_t{0}](Deadline deadline) mutable {
        notification_.wait(seen, deadline);
      };
    }
    if (options_.adjust) options_.adjust(rank, mesh);
    meshes_.push_back(std::make_unique<Mesh>(std::move(mesh)));
  }
}

MeshWorld::~MeshWorld() = default;

void MeshWorld::run(const std::function<void(int rank)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  run_each([&](int rank) {
    try {
      body(rank);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      for (const auto& signal : aborts_) signal->raise(std::current_exception());
    }
  });
  if (first) std::rethrow_exception(first);
}

std::vector<std::exception_ptr> MeshWorld::run_each(const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options_.size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options_.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

Exchange MeshWorld::exchange(int rank, const Operation& operation, Deadline deadline) {
  return Exchange(mesh(rank), members_, Signature::of(operation), deadline);
}

void MeshWorld::call(int rank, MeshAlgorithm algorithm, const Operation& operation, Deadline deadline) {
  Exchange exchange(mesh(rank), members_, Signature::of(operation), deadline);
  algorithm(exchange, operation);
}

}  // namespace maniple::test
