// What the entry points may and may not let happen.
#pragma once

#include <cstdlib>

#include <maniple/comm/error.h>

namespace maniple::fuzz {

/// Ends the program, which a fuzzer reports as a finding.
inline void require(bool condition) {
  if (!condition) std::abort();
}

/// The errors by which a parser says no.
template <class F>
void tolerate(F&& parse) {
  try {
    parse();
  } catch (const ProtocolError&) {
  } catch (const InvalidArgument&) {
  }
}

}  // namespace maniple::fuzz
