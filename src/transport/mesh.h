// The lanes between the ranks of one group: for each pair and direction, the streams that carry frames.
//
// Lanes are opened when first used. Pairs on one host use rings in shared memory when the group has them, others TCP.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/abort_signal.h"
#include "transport/byte_channel.h"
#include "transport/connector.h"

namespace maniple {

struct MeshOptions {
  std::string lane;               ///< "world/0:collective": the same on all ranks, unique in the job
  int rank = 0;                   ///< this rank in the group
  std::vector<int> global_ranks;  ///< of the group's ranks
  Connector* connector = nullptr;
  AbortSignal* abort = nullptr;
  int streams = 2;  ///< TCP connections for each pair and direction

  /// Rings in shared memory to and from the ranks of this host; return null for pairs that use TCP. May be empty.
  std::function<std::unique_ptr<ByteSink>(int rank)> local_sink;
  std::function<std::unique_ptr<ByteSource>(int rank)> local_source;
  /// Sleeps until a local ring may have moved, at most until the deadline. Empty without rings.
  std::function<void(Deadline)> local_wait;
};

class Mesh {
 public:
  explicit Mesh(MeshOptions options);
  ~Mesh();
  int rank() const noexcept;
  int size() const noexcept;

  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
