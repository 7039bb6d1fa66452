// The version of Maniple: the one that a program was compiled with (macros), and the one that it runs with (version()).
// They may differ where the libraries are shared.
//
// Before 1.0 a new minor version may change names and binary interface; a new patch version changes neither.
#pragma once

#include <maniple/export.h>

#define MANIPLE_VERSION_MAJOR 0
#define MANIPLE_VERSION_MINOR 1
#define MANIPLE_VERSION_PATCH 0
#define MANIPLE_VERSION_STRING "0.1.0"  ///< CMake refuses one that differs from the numbers
/// To compare with: `#if MANIPLE_VERSION >= MANIPLE_MAKE_VERSION(0, 2, 0)`.
#define MANIPLE_MAKE_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define MANIPLE_VERSION MANIPLE_MAKE_VERSION(MANIPLE_VERSION_MAJOR, MANIPLE_VERSION_MINOR, MANIPLE_VERSION_PATCH)

namespace MANIPLE_API maniple {

/// Of the library that this process runs with: "0.1.0".
const char* version() noexcept;

}  // namespace maniple
