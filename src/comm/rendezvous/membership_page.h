// The members of an elastic job (docs/elastic.md), in memory that the launcher shares with the workers of its node.
//
// The launcher publishes each generation of the job: which workers belong to it, their ranks, and where rank 0 serves
// the store. A worker waits for the next generation on a futex. Comparing generations takes no system call, so a worker
// can do it in every step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/base/unique_fd.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Segment;

/// One generation, as one worker sees it.
struct Membership {
  std::uint32_t generation = 0;  ///< 0: none was formed yet
  int rank = -1;                 ///< -1: this worker is not a member
  int world_size = 0;
  std::string host = {};  ///< where rank 0 serves the store
  int port = 0;
};

class MembershipPage {
 public:
  /// For the launcher of a node with this number of workers. Throws SystemError.
  static MembershipPage create(int workers);
  /// For a worker: maps the launcher's page. Throws ProtocolError if `fd` is not such a page.
  static MembershipPage map(UniqueFd fd);
  MembershipPage(MembershipPage&&) noexcept;
  ~MembershipPage();

  /// For workers to inherit; close-on-exec here.
  int fd() const noexcept;
  int workers() const noexcept;

  /// `ranks`: one per worker of the node, -1 for workers that are not members. Wakes the waiting workers.
  void publish(std::uint32_t generation, int world_size, std::string_view host, int port, std::span<const int> ranks);
  /// The launcher ends all workers: a signal that they get is not a request to leave.
  void announce_end() noexcept;

  std::uint32_t generation() const noexcept;
  bool ends() const noexcept;
  Membership read(int worker) const;
  /// Waits for a generation after `generation`. False if the deadline passes first, or the launcher ends all workers.
  bool await(std::uint32_t generation, Deadline deadline) const;

 private:
  struct Page;
  explicit MembershipPage(std::shared_ptr<Segment> segment);
  Page& page() const noexcept;

  std::shared_ptr<Segment> segment_;
};

}  // namespace maniple
