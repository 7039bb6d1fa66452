// Starts an agent on each host of --hosts, through ssh or the --rsh command, and shows its output. A lost agent is
// restarted together with the job. If the old agent reconnects by itself, whichever joins first stays.
//
// The secret is written to the standard input of ssh, never passed as an argument. That input stays open: it closes
// when this launcher ends, and the remote agent then ends all its processes.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "comm/net/poller.h"
#include "launch/launch_options.h"
#include "launch/output/console.h"
#include "launch/output/log_pump.h"

namespace maniple::launch {

class RemoteStart {
 public:
  /// Calls `failed` for a host whose agent ended before it joined.
  RemoteStart(Poller& poller, Console& console, const LaunchOptions& options, const Address& coordinator,
              const Secret& secret, std::function<void(int host, const std::string& why)> failed);
  ~RemoteStart();

  /// False if the host does not exist or has already joined.
  bool joined(int host);
  /// The host's agent is lost.
  void lost(int host);
  /// Restarts agents on the hosts that have none. A failed start is warned about once and retried for as long as
  /// `keep_trying` returns true.
  void start_missing(std::function<bool()> keep_trying);
  bool child_ended(pid_t pid, int code, int status);
  bool gone() const noexcept;

 private:
  struct Output {
    UniqueFd fd;
    std::unique_ptr<LogPump> pump;
  };
  struct Shell {
    std::size_t host = 0;
    pid_t pid = -1;
    UniqueFd input;
    Output out;
    Output err;
  };
  struct Host {
    bool joined = false;
    bool starting = false;  // its remote shell was started and has neither joined nor ended
    bool warned = false;
  };
  void start(std::size_t host);
  void start_again(std::size_t host);
  void watch(Output& output);
  void read_from(Output& output);

  Poller& poller_;
  Console& console_;
  const LaunchOptions& options_;
  Address coordinator_;
  Secret secret_;
  std::function<void(int, const std::string&)> failed_;
  std::function<bool()> keep_trying_;  // set by start_missing()
  std::vector<Host> hosts_;
  std::vector<std::unique_ptr<Shell>> shells_;  // from all starts
};

/// Whether `host` names this machine, so that ssh is not needed.
bool is_this_host(const std::string& host);

/// The address, with port 0, at which agents on `hosts` can reach this machine. Throws InvalidArgument naming a host
/// that cannot be resolved, Aborted when `cancel` is readable.
Address address_towards(const std::vector<HostSlots>& hosts, int cancel);

/// Quotes a word so that a remote shell reads it unchanged. Pure.
std::string quoted(const std::string& word);
/// Splits "ssh -p 22" into words at blanks; quotes are ordinary characters. Pure.
std::vector<std::string> split_words(const std::string& text);

}  // namespace maniple::launch
