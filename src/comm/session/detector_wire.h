// The failure detector's messages (heartbeats, departures, failures) and the connection that carries them.
//
// A frame is a length (4 bytes, at most 64 KiB), a kind (1 byte) and its fields.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "comm/net/event_loop.h"
#include "comm/net/message_stream.h"
#include "comm/session/silence.h"
#include <maniple/comm/error.h>

namespace maniple {

inline constexpr std::size_t kMostControlBytes = 64 * 1024;

struct DetectorMessage {
  enum class Kind : std::uint8_t {
    heartbeat = 1,
    leaving = 2,          ///< the sender leaves in good order
    lost = 3,             ///< `rank` is lost: `text`
    abort = 4,            ///< group `group` failed on `rank` in call number `seq`: `error`
    query_call = 5,       ///< asks which call the receiver made as number `seq` of `group`
    call_reply = 6,       ///< `rank` called `text`, at `place`
    left = 7,             ///< `rank` has left in good order
    gone = 8,             ///< `rank` has left or ended while the leader changed; which of the two is unknown
    waiting = 9,          ///< `rank` has been waiting in call number `seq` of `group`: `text`
    query_progress = 10,  ///< asks for the receiver's last call in `group`
    progress_reply = 11,  ///< the last call of `rank` in `group` is number `seq`: `text`
    departed = 12,        ///< `rank` has left `group` in good order, after its call number `seq`
    compare = 13,         ///< `rank` waits in call number `seq` of `group`: check that all make the same call
    call_pending = 14,    ///< `rank` is in `group` but has not made its call number `seq` yet
    query_alive = 15,     ///< asks whether the receiver is alive
    alive = 16,           ///< the reply
  };
  Kind kind = Kind::heartbeat;
  ErrorInfo error = {};    ///< only for `abort`
  std::int32_t rank = -1;  ///< global
  std::uint64_t seq = 0;
  std::string group = {};
  std::string text = {};
  std::string place = {};  ///< only for `call_reply`
  int origin = -1;         ///< on the leader: the sender; not encoded
};

std::string encode(const DetectorMessage& message);  ///< with the length in front; long texts are truncated
/// Decodes the bytes behind the length. Throws ProtocolError.
DetectorMessage decode_control_message(std::string_view bytes);

/// A connection of the failure detector.
///
/// Lives in the event loop's thread.
class DetectorLink : public std::enable_shared_from_this<DetectorLink> {
 public:
  using Clock = Deadline::Clock;
  struct Owner {
    std::function<void(const DetectorMessage& message)> message;
    std::function<void(const std::string& why)> closed;  ///< closed by the peer, or broken; not called after close()
  };

  DetectorLink(std::shared_ptr<EventLoop> loop, SecureConnection connection);
  ~DetectorLink();

  void open(Owner owner);  ///< starts reading
  /// Sends at once what fits and keeps the rest. While a rank does not read, messages that are repeated anyway
  /// (heartbeats, queries) are dropped for it; others are kept, up to a limit. Only whole frames are dropped.
  void send(const DetectorMessage& message);
  void close();  ///< drops unsent messages; the owner is not called afterwards

  bool has_received() const noexcept { return has_received_; }          ///< whether a frame has arrived
  Clock::time_point heard() const noexcept { return stream_.heard(); }  ///< when the last authentic bytes arrived
  Silence& silence() noexcept { return silence_; }

  static constexpr std::size_t kMostBacklog = std::size_t{16} << 20;

 private:
  void on_ready(std::uint32_t ready);
  void read();
  void take_messages();
  void flush();
  void fail(const std::string& why);

  std::shared_ptr<EventLoop> loop_;
  MessageStream stream_;
  Owner owner_;
  bool awaits_room_ = false;
  bool has_received_ = false;
  Silence silence_;
};

}  // namespace maniple
