// What a mesh keeps from call to call. Used by one exchange at a time.
#pragma once

#include <cstdlib>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/mesh.h"
#include "transport/recv_lane.h"
#include "transport/send_lane.h"
#include "transport/tcp_channel.h"

namespace maniple {

struct Mesh::Impl {
  explicit Impl(MeshOptions mesh_options);

  Peer peer(int rank) const { return {rank, options.global_ranks[static_cast<std::size_t>(rank)]}; }
  SendLane& sender(int rank);
  RecvLane& receiver(int rank);
  std::span<std::byte> scratch(std::size_t bytes);

  MeshOptions options;
  TcpChannelOptions channel_options;
  std::vector<std::unique_ptr<SendLane>> senders;
  std::vector<std::unique_ptr<RecvLane>> receivers;
  std::deque<Transfer> transfers;  // of the current exchange; a deque because lanes point into it
  bool busy = false;               // an exchange is under way
  std::string broken;              // why no further exchange is possible: a lane stands in the middle of a frame

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace maniple
