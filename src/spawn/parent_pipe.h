// How a daemon notices the end of its parent: a pipe whose writing end only the parent has. The kernel closes it with
// the parent, however that ends, and sends SIGKILL to whoever has asked for it at the reading end.
//
// PR_SET_PDEATHSIG is not used, because it acts when the *thread* that started the child ends.
#pragma once

#include <utility>

#include "base/unique_fd.h"

namespace maniple::launch {

/// The parent's end. Copies of it in children of fork() are closed there, or they would keep the daemons alive.
class ParentPipe {
 public:
  ParentPipe();
  ~ParentPipe();
  ParentPipe(const ParentPipe&) = delete;
  ParentPipe& operator=(const ParentPipe&) = delete;

  int child_end() const noexcept { return reading_.get(); }
  void close_child_end() noexcept { reading_.reset(); }

 private:
  UniqueFd reading_;
  int writing_ = -1;
};

/// In the child: from now on this process dies with its parent; at once, if that is gone already.
void die_with_parent(int parent_pipe);

}  // namespace maniple::launch
