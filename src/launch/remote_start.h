// Starts an agent on each host of --hosts, by ssh or what --rsh names, and shows what comes back.
//
// The secret goes through the standard input of ssh, never through an argument; the input then stays open: when this
// launcher is gone it closes, and the agent at its other end ends everything.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launch/console.h"
#include "launch/launch_options.h"
#include "launch/log_pump.h"
#include "launch/poller.h"
#include "net/address.h"
#include "net/handshake.h"

namespace maniple::launch {

class RemoteStart {
 public:
  /// `failed` is told of a host whose agent ended before it had joined.
  RemoteStart(Poller& poller, Console& console, const LaunchOptions& options, const Address& conductor,
              const Secret& secret, std::function<void(int host, const std::string& why)> failed);
  ~RemoteStart();

  /// False if there is no such host, or it is there already.
  bool joined(int host);
  bool child_ended(pid_t pid, int code, int status);
  bool gone() const noexcept;

 private:
  struct Output {
    UniqueFd fd;
    std::unique_ptr<LogPump> pump;
  };
  struct Shell {
    pid_t pid = -1;
    bool joined = false;
    UniqueFd input;
    Output out;
    Output err;
    std::shared_ptr<LastWords> words;
  };
  void start(const LaunchOptions& options, std::size_t host, const Address& conductor, const Secret& secret);
  void watch(Output& output);
  void read_from(Output& output);

  Poller& poller_;
  Console& console_;
  std::function<void(int, const std::string&)> failed_;
  std::vector<std::unique_ptr<Shell>> shells_;
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
