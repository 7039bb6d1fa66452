// Which ranks of this host wait in init() and which have joined, as they say themselves (rendezvous/init_notice.h). Programs
// that do not use Maniple say nothing.
#pragma once

#include <optional>
#include <set>
#include <string_view>

#include "base/unique_fd.h"

namespace maniple::launch {

class InitNotices {
 public:
  /// Forgets everything and makes a new line for the next ranks. Throws SystemError.
  void open();
  /// For MANIPLE_INIT_FD: what ranks inherit. Close-on-exec here. -1: not open.
  int rank_end() const noexcept { return rank_end_.get(); }
  /// Readable when there is news; non-blocking. -1: not open.
  int own_end() const noexcept { return own_end_.get(); }
  /// After all ranks were started: only they have the other end now.
  void close_rank_end() noexcept { rank_end_.reset(); }
  void close() noexcept;

  /// Takes the news. False when there will be no more: all who could write have gone.
  bool read();

  bool has_joined(int rank) const { return joined_.count(rank) != 0; }
  /// A rank that waits in init() for all ranks of the job.
  std::optional<int> waiting() const;

 private:
  void take(std::string_view notice);

  UniqueFd own_end_, rank_end_;
  std::set<int> joining_, joined_;
};

}  // namespace maniple::launch
