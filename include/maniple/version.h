// The version of Maniple that a program was compiled with (macros) and runs with (version()). The two may differ if the
// libraries are shared.
//
//   #if MANIPLE_VERSION >= MANIPLE_MAKE_VERSION(0, 2, 0)
//
// Compatibility: before 1.0, a new minor version may change names and binary interface; a new patch version changes
// neither.
#pragma once

#include <maniple/export.h>

#define MANIPLE_VERSION_MAJOR 0
#define MANIPLE_VERSION_MINOR 1
#define MANIPLE_VERSION_PATCH 0
#define MANIPLE_VERSION_STRING "0.1.0"  ///< CMake checks that it matches the numbers
/// A version as a number, for comparisons with MANIPLE_VERSION.
#define MANIPLE_MAKE_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define MANIPLE_VERSION MANIPLE_MAKE_VERSION(MANIPLE_VERSION_MAJOR, MANIPLE_VERSION_MINOR, MANIPLE_VERSION_PATCH)

namespace MANIPLE_API maniple {

/// The version of the library that this process runs with: "0.1.0".
const char* version() noexcept;

}  // namespace maniple
