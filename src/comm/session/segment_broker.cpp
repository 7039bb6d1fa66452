#include "comm/session/segment_broker.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "comm/shm/segment.h"

namespace maniple {
namespace {

// Offers to threads of this process.
struct ProcessTable {
  Mutex mutex;
  CondVar changed;
  struct Offer {
    SharedFile file;
    int takers = 0;  // takers that have not fetched it
  };
  std::map<std::pair<std::uint64_t, std::string>, Offer> offers MANIPLE_GUARDED_BY(mutex);
};

constinit ProcessWide<ProcessTable> process_table;

}  // namespace

SegmentBroker::~SegmentBroker() {
  ProcessTable& table = *process_table;
  const MutexLock lock(table.mutex);
  for (const std::string& topic : offered_here_) table.offers.erase({world_, topic});
}

void SegmentBroker::offer(const std::string& topic, SharedFile file, int processes, int threads) {
  if (threads > 0) {
    ProcessTable& table = *process_table;
    const MutexLock lock(table.mutex);
    std::erase_if(offered_here_, [&](const std::string& earlier) MANIPLE_REQUIRES(table.mutex) {
      return table.offers.count({world_, earlier}) == 0;
    });
    offered_here_.push_back(topic);
    table.offers[{world_, topic}] = {file, threads};
    table.changed.notify_all();
  }
  {
    const MutexLock lock(mutex_);
    if (processes == 0) return;
    Offer& offer = offers_[topic];
    offer.file = std::move(file);
    offer.takers = processes;
  }
  hand_over(topic);
}

void SegmentBroker::serve(const std::string& topic, UniqueFd connection) {
  {
    const MutexLock lock(mutex_);
    offers_[topic].waiting.push_back(std::move(connection));
  }
  hand_over(topic);
}

void SegmentBroker::hand_over(const std::string& topic) {
  const MutexLock lock(mutex_);
  const auto it = offers_.find(topic);
  if (it == offers_.end() || !it->second.file) return;
  Offer& offer = it->second;
  for (UniqueFd& connection : offer.waiting) {
    try {
      send_descriptor(connection.get(), offer.file->fd(), offer.file->about());
    } catch (const Error& error) {
      log_debug("shared memory {}: {}", topic, error.what());  // the taker has gone and reports its own error
    }
    --offer.takers;
  }
  offer.waiting.clear();
  if (offer.takers <= 0) offers_.erase(it);
}

SharedFile SegmentBroker::take_here(std::uint64_t world, const std::string& topic, Deadline deadline) {
  ProcessTable& table = *process_table;
  MutexLock lock(table.mutex);
  const auto there = [&]() MANIPLE_REQUIRES(table.mutex) { return table.offers.count({world, topic}) != 0; };
  if (deadline.is_never()) {
    table.changed.wait(lock, there);
  } else if (!table.changed.wait_until(lock, deadline.when(), there)) {
    throw Timeout(fmt::format("no shared memory was offered for {} in time", topic));
  }
  const auto it = table.offers.find({world, topic});
  SharedFile file = it->second.file;
  if (--it->second.takers == 0) table.offers.erase(it);
  return file;
}

}  // namespace maniple
