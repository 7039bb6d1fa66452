// Starts an agent on each host of --hosts, by ssh or what --rsh names, and shows what comes back. An agent that was
// lost is started again when the job is; the old one may come back by itself, and whichever joins first stays.
//
// The secret goes through the standard input of ssh, never through an argument; the input then stays open: when this
// launcher is gone it closes, and the agent at its other end ends everything.
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
  /// `failed` is told of a host whose agent ended before it had joined.
  RemoteStart(Poller& poller, Console& console, const LaunchOptions& options, const Address& coordinator,
              const Secret& secret, std::function<void(int host, const std::string& why)> failed);
  ~RemoteStart();

  /// False if there is no such host, or it is there already.
  bool joined(int host);
  /// The agent of the host is lost.
  void lost(int host);
  /// Starts agents again where there is none. One that cannot be started is tried again, with one warning, for as long
  /// as `keep_trying`.
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
    bool starting = false;  // a shell is under way
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
  std::function<bool()> keep_trying_;  // set once agents are started again
  std::vector<Host> hosts_;
  std::vector<std::unique_ptr<Shell>> shells_;  // of all starts
};

/// Is this name this machine itself? Then no ssh is needed.
bool is_this_host(const std::string& host);

/// The address at which agents on the hosts can reach this machine, port 0. Throws InvalidArgument naming a host that
/// cannot be resolved, Aborted when `cancel` is readable.
Address address_towards(const std::vector<HostSlots>& hosts, int cancel);

/// The command for a remote shell: words that a shell would read as they are. Pure.
std::string quoted(const std::string& word);
/// "ssh -p 22" -> its words; blanks separate, quotes are not understood. Pure.
std::vector<std::string> split_words(const std::string& text);

}  // namespace maniple::launch
