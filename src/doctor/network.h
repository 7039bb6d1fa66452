// Interfaces, the one that data would use, loopback, and whether a port can be listened on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "doctor/checks.h"

namespace maniple::doctor {

struct Interface {
  std::string name;
  std::string address;
  bool up = false;
  bool loopback = false;
};

std::vector<Interface> list_interfaces();  ///< an entry for each address

struct NetworkFacts {
  std::vector<Interface> interfaces;
  std::string chosen = {};          ///< MANIPLE_INTERFACE; empty: not set
  std::string chosen_problem = {};  ///< why it cannot be used
  std::string route = {};           ///< the address towards other networks; empty: no route
  std::string hostname = {};
  std::vector<std::string> hostname_addresses = {};
  std::string loopback_problem = {};  ///< connecting to 127.0.0.1; empty: it works
  std::string port_problem = {};      ///< listening on a free port; empty: it works
};

Findings judge(const NetworkFacts& facts);
NetworkFacts inspect_network();

}  // namespace maniple::doctor
