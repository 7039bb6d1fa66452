// One connection of the failure detector: whole frames out, whole frames in, inside records (see net/records.h).
//
// Lives in the event loop's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "net/event_loop.h"
#include "net/secure_connection.h"
#include "session/detector_wire.h"

namespace maniple {

class DetectorLink : public std::enable_shared_from_this<DetectorLink> {
 public:
  using Clock = Deadline::Clock;
  struct Owner {
    std::function<void(const DetectorMessage& message)> message;
    std::function<void(const std::string& why)> closed;  ///< by the other side, or broken; not after close()
  };

  DetectorLink(std::shared_ptr<EventLoop> loop, SecureConnection connection);
  ~DetectorLink();

  void open(Owner owner);  ///< starts to read
  /// Sends what can be sent at once and keeps the rest. A rank that does not read gets no more of what is repeated anyway
  /// (heartbeats, queries); other frames are kept, up to a limit. Frames are left out whole or not at all.
  void send(const DetectorMessage& message);
  void close();  ///< what could not be sent yet is lost; the owner is not called any more

  bool has_received() const noexcept { return has_received_; }  ///< whether a frame has arrived
  Clock::time_point heard() const noexcept { return heard_; }   ///< when something authentic arrived last
  void set_heard(Clock::time_point when) noexcept { heard_ = when; }

  static constexpr std::size_t kMostBacklog = std::size_t{16} << 20;

 private:
  void on_ready(std::uint32_t ready);
  void read();
  void take_frames();
  void flush();
  void fail(const std::string& why);

  std::shared_ptr<EventLoop> loop_;
  UniqueFd fd_;
  Owner owner_;
  RecordOpener opener_;
  RecordSealer sealer_;
  std::string incoming_;
  std::string outgoing_;  // records
  bool awaits_room_ = false;
  bool has_received_ = false;
  Clock::time_point heard_ = Clock::now();
};

}  // namespace maniple
