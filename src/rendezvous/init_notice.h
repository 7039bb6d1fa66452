// Notices from a rank to the launcher that started it, through the socket that MANIPLE_INIT_FD names: that it waits in init()
// for the others, and that init() is done. So the launcher knows at once when a rank ends that the others will wait for in vain.
#pragma once

namespace maniple {

/// In init(), before it waits. `world_size` is what the program asked for, 0 or less: the launcher's own. Says nothing when
/// that is another world than the launcher's: then not all of its processes need to come.
void notify_init_started(int world_size) noexcept;

/// All ranks have arrived.
void notify_init_done() noexcept;

}  // namespace maniple
