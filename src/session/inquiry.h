// On the hub, when a group failed because its ranks called different things: asks every rank what it called, so that the error
// can say so.
//
// Runs in the event loop's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "net/event_loop.h"
#include "session/detector_wire.h"

namespace maniple {

class Inquiries : public std::enable_shared_from_this<Inquiries> {
 public:
  struct Means {
    std::shared_ptr<EventLoop> loop;
    int rank = 0;
    std::function<std::string(const std::string& group, std::uint64_t seq)> called;  ///< by this rank; empty: not yet
    std::function<void(int rank, const DetectorMessage& message)> send;
    std::function<void(const DetectorMessage& abort)> concluded;  ///< with the answers in its text
  };
  explicit Inquiries(Means means) : means_(std::move(means)) {}

  bool is_open(const std::string& group) const { return open_.count(group) != 0; }
  void begin(const DetectorMessage& abort, const std::vector<int>& others);
  void answered(const DetectorMessage& answer);
  void stop() { open_.clear(); }

 private:
  struct Inquiry {
    DetectorMessage abort;
    DetectorMessage question;
    std::map<int, std::string> answers;
    std::set<int> awaited;
  };
  void ask(const std::string& group);
  void conclude(const std::string& group);

  Means means_;
  std::map<std::string, Inquiry> open_;
};

}  // namespace maniple
