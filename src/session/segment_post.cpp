#include "session/segment_post.h"

#include <condition_variable>

#include "base/check.h"
#include "base/log.h"
#include "shm/descriptor_passing.h"

namespace maniple {
namespace {

// Threads of this process look here.
struct ProcessTable {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<std::uint64_t, std::string>, std::shared_ptr<Segment>> segments;
};

ProcessTable& process_table() {
  static auto* table = new ProcessTable;  // never destroyed: threads may outlive static objects
  return *table;
}

}  // namespace

SegmentPost::~SegmentPost() {
  std::vector<std::string> topics;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [topic, offer] : offers_) topics.push_back(topic);
  }
  for (const std::string& topic : topics) withdraw(topic);
}

void SegmentPost::offer(const std::string& topic, std::shared_ptr<Segment> segment, int takers) {
  {
    ProcessTable& table = process_table();
    const std::lock_guard lock(table.mutex);
    table.segments[{world_, topic}] = segment;
    table.changed.notify_all();
  }
  {
    const std::lock_guard lock(mutex_);
    Offer& offer = offers_[topic];
    offer.segment = std::move(segment);
    offer.takers += takers;
  }
  hand_over(topic);
}

void SegmentPost::withdraw(const std::string& topic) {
  ProcessTable& table = process_table();
  const std::lock_guard lock(table.mutex);
  table.segments.erase({world_, topic});
}

void SegmentPost::serve(const std::string& topic, UniqueFd connection) {
  {
    const std::lock_guard lock(mutex_);
    offers_[topic].waiting.push_back(std::move(connection));
  }
  // The welcome of the handshake goes out first.
  loop_->post([this, topic] { hand_over(topic); });
}

void SegmentPost::hand_over(const std::string& topic) {
  const std::lock_guard lock(mutex_);
  const auto it = offers_.find(topic);
  if (it == offers_.end() || !it->second.segment) return;
  Offer& offer = it->second;
  for (UniqueFd& connection : offer.waiting) {
    try {
      send_descriptor(connection.get(), offer.segment->fd(), offer.segment->size());
    } catch (const Error& error) {
      log_debug("shared memory {}: {}", topic, error.what());  // the taker has gone; its own error says so
    }
    --offer.takers;
  }
  offer.waiting.clear();
  if (offer.takers <= 0) offers_.erase(it);
}

std::shared_ptr<Segment> SegmentPost::take_here(std::uint64_t world, const std::string& topic, Deadline deadline) {
  ProcessTable& table = process_table();
  std::unique_lock lock(table.mutex);
  const auto there = [&] { return table.segments.count({world, topic}) != 0; };
  if (deadline.is_never()) {
    table.changed.wait(lock, there);
  } else if (!table.changed.wait_until(lock, deadline.when(), there)) {
    throw Timeout(fmt::format("no shared memory was offered for {} in time", topic));
  }
  return table.segments.at({world, topic});
}

}  // namespace maniple
