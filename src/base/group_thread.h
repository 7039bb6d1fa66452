// Whether the calling thread is one of a group's own, which run what users attach to a Work.
#pragma once

namespace maniple {

inline thread_local bool on_group_thread = false;

}  // namespace maniple
