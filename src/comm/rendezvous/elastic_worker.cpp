#include "comm/rendezvous/elastic_worker.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <fmt/format.h>

#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

struct Taken {
  Mutex mutex;
  std::unique_ptr<ElasticWorker> worker MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Taken> elastic_place;  // a child of fork() has none

std::uint64_t inode_of(int fd) noexcept {
  struct stat status{};
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) ? status.st_ino : 0;
}

}  // namespace

std::string members_value(int fd, int worker, bool replaces) {
  return fmt::format("{}:{}:{}:{}", fd, inode_of(fd), worker, replaces ? 1 : 0);
}

ElasticWorker* elastic_worker() {
  Taken& mine = *elastic_place;
  const MutexLock lock(mine.mutex);
  const char* const text = std::getenv(kMembersVariable);
  if (text == nullptr) return mine.worker.get();
  int fd = -1, worker = -1, replaces = 0;
  unsigned long long inode = 0;
  const bool parsed = std::sscanf(text, "%d:%llu:%d:%d", &fd, &inode, &worker, &replaces) == 4;
  ::unsetenv(kMembersVariable);
  // A program started by a rank may inherit the variable without the descriptor.
  if (!parsed || fd < 0 || worker < 0 || inode == 0 || inode_of(fd) != inode) return mine.worker.get();
  MembershipPage page = MembershipPage::map(kept_from_children(UniqueFd(fd)));
  if (worker >= page.workers()) throw ProtocolError(fmt::format("{}: worker {} of {}", text, worker, page.workers()));
  mine.worker = std::make_unique<ElasticWorker>(
      ElasticWorker{.page = std::move(page), .worker = worker, .replaces = replaces != 0});
  return mine.worker.get();
}

}  // namespace maniple
