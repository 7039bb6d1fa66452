// An attempt whose failure is a finding, not an error.
#pragma once

#include <exception>
#include <string>

namespace maniple::doctor {

/// What goes wrong in `attempt`; empty: nothing.
template <class Attempt>
std::string problem_in(Attempt attempt) {
  try {
    attempt();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace maniple::doctor
