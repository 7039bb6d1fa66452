// Whether other machines can be reached, and can reach this one: what a job on several needs.
//
// For each host, over the remote shell:  maniple doctor --answer ITS_ADDRESS --connect-back OUR_ADDRESS:PORT --token
// TOKEN The other side listens, says where, connects back and waits for our connection:
//
//   listening VERSION PORT        our side then connects there and sends the token
//   connected-back                or: cannot-connect-back REASON
//   received                      or: received-nothing REASON
#pragma once

#include <string>

#include "tools/doctor/checks.h"

namespace maniple::doctor {

struct HostFacts {
  std::string host;
  std::string resolve_problem = {};
  std::string address = {};         ///< what the name means
  std::string own_address = {};     ///< from which this machine would reach it
  std::string interface_name = {};  ///< that has this address
  std::string shell_problem = {};   ///< the remote shell or the program there did not start
  std::string version = {};         ///< of the program there
  std::string there_problem = {};   ///< connecting there from here
  std::string back_problem = {};    ///< connecting here from there
};

/// `own_version`: that of this program.
Findings judge(const HostFacts& facts, const std::string& own_version);

struct HostOptions {
  std::string remote_shell = "ssh -o BatchMode=yes -o ConnectTimeout=10";
  std::string program;  ///< on the other machine; empty: the path of this one
};
HostFacts inspect_host(const std::string& host, const HostOptions& options);

/// The other side. The result is the exit code.
int answer_doctor(const std::string& own_address, const std::string& connect_back, const std::string& token,
                  const std::string& version);

}  // namespace maniple::doctor
