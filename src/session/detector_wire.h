// The messages of the failure detector: that a rank lives, that it leaves, that something went wrong.
//
// A frame is a length (4 bytes, at most 64 KiB), a kind (1 byte) and its fields.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <maniple/comm/error.h>

namespace maniple {

inline constexpr std::size_t kMostControlBytes = 64 * 1024;

struct DetectorMessage {
  enum class Kind : std::uint8_t {
    heartbeat = 1,
    leaving = 2,          ///< the sender leaves in good order
    lost = 3,             ///< `rank` is lost: `text`
    abort = 4,            ///< group `group` failed on `rank` in call number `seq`: `error`
    query_call = 5,       ///< what did you call as number `seq` of `group`?
    call_reply = 6,       ///< `rank` called `text`
    left = 7,             ///< `rank` has left in good order
    gone = 8,             ///< `rank` has left or ended while the leader changed; nobody knows which
    waiting = 9,          ///< `rank` has waited long in call number `seq` of `group`: `text`
    query_progress = 10,  ///< how far are you in `group`?
    progress_reply = 11,  ///< the last call of `rank` in it is number `seq`: `text`
  };
  Kind kind = Kind::heartbeat;
  ErrorInfo error = {};    ///< of an abort only
  std::int32_t rank = -1;  ///< global
  std::uint64_t seq = 0;
  std::string group = {};
  std::string text = {};
  int origin = -1;  ///< on the leader: who sent it; not encoded
};

std::string encode(const DetectorMessage& message);  ///< with its length in front; long texts are cut
/// Of the bytes behind the length. Throws ProtocolError.
DetectorMessage decode_control_message(std::string_view bytes);

}  // namespace maniple
