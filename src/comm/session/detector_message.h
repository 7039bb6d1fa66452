// The failure detector's messages: heartbeats, departures, failures, and queries about calls.
//
//   const std::string frame = detector::encode(detector::Left{.rank = 3});
//   const detector::Message message = detector::decode(body);  // the frame without its length
//
// A frame is a length (4 bytes, at most 64 KiB), a kind (1 byte: the position in Message, from 1) and the fields. Ranks
// are global. No I/O.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "comm/base/overloaded.h"
#include <maniple/comm/error.h>

namespace maniple::detector {

inline constexpr std::size_t kMaxFrameBytes = 64 * 1024;  ///< without the length

inline constexpr std::size_t kMaxMembers = 8192;  ///< in a list of ranks

struct Heartbeat {};
/// The sender leaves in good order.
struct Leaving {};
struct Lost {
  std::int32_t rank = -1;
  std::string text = {};  ///< the whole reason, as in the error
};
/// `group` failed on `rank` in call number `seq`.
struct Abort {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
  ErrorInfo error = {};
  int origin = -1;  ///< on the leader: the sender; not encoded
};
/// Queries the receiver's call number `seq` of `group`.
struct QueryCall {
  std::uint64_t seq = 0;
  std::string group = {};
};
/// The call of `rank`, and its source line.
struct CallReply {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
  std::string call = {};
  std::string place = {};
};
/// `rank` has left in good order.
struct Left {
  std::int32_t rank = -1;
};
/// `rank` has left or ended while the leader changed; which of the two is unknown.
struct Gone {
  std::int32_t rank = -1;
};
/// `rank` has been waiting for the other members in its call number `seq` of `group`.
struct Waiting {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
  std::string call = {};
  std::uint64_t waited_ms = 0;
  std::vector<std::int32_t> members = {};
};
/// Queries the receiver's last call in `group`.
struct QueryProgress {
  std::string group = {};
};
/// The last call of `rank` in `group` is number `seq` (0: none).
struct ProgressReply {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
  std::string text = {};
};
/// `rank` has left `group` in good order, after its call number `seq`.
struct Departed {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
};
/// `rank` waits in call number `seq` of `group`: the leader checks that all ranks make the same call.
struct Compare {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
  bool arguments = true;                   ///< false: only the operations are compared
  std::vector<std::int32_t> members = {};  ///< of the group; empty: all ranks of the world
};
/// `rank` is in `group` but has not made its call number `seq` yet.
struct CallPending {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
};
struct QueryAlive {};
struct Alive {};
/// `rank` waits for the survivors of `group`: survivors.h. Its last round is number `seq` (0: none), whose group it has
/// `made` or not.
struct Shrink {
  std::int32_t rank = -1;
  std::uint64_t seq = 0;
  std::string group = {};
  bool made = false;
  std::vector<std::int32_t> members = {};  ///< of the group
};
/// The survivors of `group` in round `seq`. Confirmed: all of them have made the new group.
struct Survivors {
  std::uint64_t seq = 0;
  std::string group = {};
  bool confirmed = false;
  std::vector<std::int32_t> members = {};
};
/// `rank` does not wait for the survivors of `group` any more. The reply is Missing.
struct CancelShrink {
  std::int32_t rank = -1;
  std::string group = {};
};
/// The members that other survivors of `group` wait for.
struct Missing {
  std::string group = {};
  std::vector<std::int32_t> members = {};
};

using Message = std::variant<Heartbeat, Leaving, Lost, Abort, QueryCall, CallReply, Left, Gone, Waiting, QueryProgress,
                             ProgressReply, Departed, Compare, CallPending, QueryAlive, Alive, Shrink, Survivors,
                             CancelShrink, Missing>;

std::string encode(const Message& message);  ///< with the length in front; long texts are truncated
/// Decodes the bytes behind the length. Throws ProtocolError.
Message decode(std::string_view body);

/// Whether the sender repeats this message anyway.
inline bool is_repeated(const Message& message) {
  return std::holds_alternative<Heartbeat>(message) || std::holds_alternative<QueryCall>(message) ||
         std::holds_alternative<Compare>(message);
}

}  // namespace maniple::detector
