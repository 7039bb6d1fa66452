// Checks that this machine and other hosts can reach each other, as jobs on several machines require.
//
// On each host the remote shell runs
//
//   maniple doctor --answer ITS_ADDRESS --connect-back OUR_ADDRESS:PORT --token TOKEN
//
// The remote side listens, prints its port, connects back and waits for this side's connection. It prints:
//
//   listening VERSION PORT        this side then connects there and sends the token
//   connected-back                or: cannot-connect-back REASON
//   received                      or: received-nothing REASON
#pragma once

#include <string>

#include "tools/doctor/checks.h"

namespace maniple::doctor {

struct HostFacts {
  std::string host;
  std::string resolve_problem = {};
  std::string address = {};         ///< the host's resolved address
  std::string own_address = {};     ///< this machine's address towards the host
  std::string interface_name = {};  ///< the interface with own_address
  std::string shell_problem = {};   ///< why the remote shell or the remote program did not start
  std::string version = {};         ///< of the remote program
  std::string there_problem = {};   ///< why this machine cannot connect to the host
  std::string back_problem = {};    ///< why the host cannot connect back
};

/// `own_version`: this program's version.
Findings judge(const HostFacts& facts, const std::string& own_version);

struct HostOptions {
  std::string remote_shell = "ssh -o BatchMode=yes -o ConnectTimeout=10";
  std::string program;  ///< path on the other machine; empty: the path of this program
};
HostFacts inspect_host(const std::string& host, const HostOptions& options);

/// Runs the remote side. Returns the exit code.
int answer_doctor(const std::string& own_address, const std::string& connect_back, const std::string& token,
                  const std::string& version);

}  // namespace maniple::doctor
