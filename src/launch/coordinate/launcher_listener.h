// Connects the launchers of a job: the coordinator listens, the others dial. Each launcher proves that it holds the
// secret.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "comm/net/poller.h"
#include "launch/option_values.h"

namespace maniple::launch {

/// Listens, and passes authenticated connections to `arrived` on the poller's thread.
class LauncherListener {
 public:
  LauncherListener(Poller& poller, UniqueFd listener, const Identity& identity,
                   std::function<void(SecureConnection)> arrived);
  ~LauncherListener();
  const Address& address() const noexcept { return address_; }

 private:
  struct Queue;
  Poller& poller_;
  Address address_;
  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Acceptor> acceptor_;
};

/// The identity that launchers present in the handshake.
Identity launcher_identity(const Secret& secret);

struct MasterListener {
  UniqueFd fd = {};
  bool taken = false;  ///< the address belongs to this host, but another process already listens there
};
/// Listens at whichever of the master's addresses belongs to this host. Returns no descriptor if none does, or if
/// `port_may_be_taken` and another process (most likely a launcher) listens there. Throws SystemError when the port is
/// taken otherwise, Aborted when `cancel` becomes readable during name resolution.
MasterListener listen_as_master(const MasterAddress& place, const Secret& secret, bool port_may_be_taken,
                                Deadline deadline, int cancel);

/// The address that --master names, for a single-node job. Throws InvalidArgument naming the host, or Aborted.
Address own_address(const MasterAddress& place, int cancel);

/// Dials until the deadline. Throws Timeout naming the address; Aborted when `cancel` is readable. `waiting` is called
/// once if dialing takes longer than a few seconds.
SecureConnection dial_master(const MasterAddress& place, const Secret& secret, Deadline deadline, int cancel,
                             const std::function<void(const std::string&)>& waiting);

}  // namespace maniple::launch
