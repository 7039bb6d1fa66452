// The connection that carries the failure detector's messages.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "comm/net/event_loop.h"
#include "comm/net/message_stream.h"
#include "comm/session/detector_message.h"

namespace maniple {

/// Lives in the event loop's thread.
class DetectorLink : public std::enable_shared_from_this<DetectorLink> {
 public:
  struct Owner {
    std::function<void(detector::Message message)> message;
    std::function<void()> heard;                         ///< authentic bytes have arrived, but no whole message
    std::function<void(const std::string& why)> closed;  ///< closed by the peer, or broken; not called after close()
  };

  DetectorLink(std::shared_ptr<EventLoop> loop, SecureConnection connection);
  ~DetectorLink();

  void open(Owner owner);  ///< starts reading
  /// Sends at once what fits and keeps the rest. While a rank does not read, messages that are repeated anyway
  /// (heartbeats, queries) are dropped for it; others are kept, up to a limit. Only whole frames are dropped.
  void send(const detector::Message& message);
  void close();  ///< drops unsent messages; the owner is not called afterwards

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
};

}  // namespace maniple
