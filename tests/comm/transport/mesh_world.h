// Ranks as threads, connected by a mesh: over TCP on loopback, as it is or in records, or over rings in shared memory.
//
// The first rank that throws aborts all, and its error is what run() reports; so nothing hangs.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "comm/base/abort_signal.h"
#include "comm/collective/algorithms.h"
#include "comm/transport/connector.h"
#include "comm/transport/mesh.h"

namespace maniple::test {

/// Wakes everyone who waits for a ring; notified whenever one has moved.
class Notification {
 public:
  void notify();
  /// Until there was a notification since `seen`, which is brought up to date.
  void wait(std::uint64_t& seen, Deadline deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t count_ = 0;
};

/// Connections that were dialled and not yet taken, of all ranks.
class Board {
 public:
  explicit Board(int ranks);
  void put(int from, int to, const std::string& topic, SecureConnection socket);
  SecureConnection take(int from, int to, const std::string& topic);
  int arrival_fd(int rank) const { return arrivals_[static_cast<std::size_t>(rank)].get(); }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, std::string>, SecureConnection> waiting_;
  std::vector<UniqueFd> arrivals_;
};

/// A connected pair of TCP sockets on loopback: the dialler's and the acceptor's end.
std::pair<UniqueFd, UniqueFd> tcp_pair();

class TestConnector final : public Connector {
 public:
  TestConnector(Board& board, int rank, bool sealed = false) : board_(board), rank_(rank), sealed_(sealed) {}
  SecureConnection dial(int global_rank, const std::string& topic, Deadline deadline,
                        const AbortSignal& abort) override;
  SecureConnection try_take(int global_rank, const std::string& topic) override {
    return board_.take(global_rank, rank_, topic);
  }
  int arrival_fd() const noexcept override { return board_.arrival_fd(rank_); }

 private:
  Board& board_;
  int rank_;
  bool sealed_;
};

enum class Channel { tcp, sealed, ring };

struct WorldOptions {
  int size = 2;
  Channel channel = Channel::tcp;
  int streams = 2;
  std::size_t ring_capacity = 64 << 10;
  int first_global_rank = 0;
  /// Changes a rank's mesh options before the mesh is made, to put a faulty channel in.
  std::function<void(int rank, MeshOptions& options)> adjust = {};
};

class MeshWorld {
 public:
  explicit MeshWorld(const WorldOptions& options);
  ~MeshWorld();

  int size() const noexcept { return options_.size; }
  Mesh& mesh(int rank) { return *meshes_[static_cast<std::size_t>(rank)]; }
  AbortSignal& abort(int rank) { return *aborts_[static_cast<std::size_t>(rank)]; }
  void drop(int rank) { meshes_[static_cast<std::size_t>(rank)].reset(); }  ///< as if its process had ended

  /// Runs `body(rank)` in a thread for every rank; throws the first rank's error.
  void run(const std::function<void(int rank)>& body);
  /// The same, without aborting the others: what each rank threw, or null.
  std::vector<std::exception_ptr> run_each(const std::function<void(int rank)>& body);

  /// One collective of all ranks, seen from `rank`.
  void call(int rank, MeshAlgorithm algorithm, const Operation& operation, Deadline deadline = default_deadline());
  Exchange exchange(int rank, const Operation& operation, Deadline deadline = default_deadline());
  static Deadline default_deadline() { return Deadline::after(std::chrono::seconds(60)); }

 private:
  WorldOptions options_;
  Board board_;
  Notification notification_;
  std::vector<int> members_;
  struct RingMemory;
  std::vector<std::unique_ptr<RingMemory>> rings_;  // [from * size + to]
  std::vector<std::unique_ptr<TestConnector>> connectors_;
  std::vector<std::unique_ptr<AbortSignal>> aborts_;
  std::vector<std::unique_ptr<Mesh>> meshes_;
};

}  // namespace maniple::test
