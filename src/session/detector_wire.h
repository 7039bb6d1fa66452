// What ranks tell each other beside the data: that they live, that they leave, that something went wrong.
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
    bye = 2,        ///< the sender leaves in good order
    lost = 3,       ///< `rank` is lost: `text`
    abort = 4,      ///< group `group` failed on `rank`: `error`, `text`
    question = 5,   ///< what did you call as number `seq` of `group`?
    answer = 6,     ///< `rank` called `text`
    left = 7,       ///< `rank` has left in good order
    gone = 8,       ///< `rank` has left or ended while the hub changed; nobody knows which
    waiting = 9,    ///< `rank` has waited long in call number `seq` of `group`: `text`
    progress = 10,  ///< how far are you in `group`?
    position = 11,  ///< the last call of `rank` in it is number `seq`: `text`
  };
  Kind kind = Kind::heartbeat;
  ErrorKind error = ErrorKind::aborted;
  std::int32_t rank = -1;  ///< global
  std::uint64_t seq = 0;
  std::string group;
  std::string text;
  int origin = -1;  ///< on the hub: who sent it; does not travel
};

std::string encode(const DetectorMessage& message);  ///< with its length in front; long texts are cut
/// Of the bytes behind the length. Throws ProtocolError.
DetectorMessage decode_control_message(std::string_view bytes);

}  // namespace maniple
