// MANIPLE_API marks the symbols that the shared libraries export; all others are hidden. It is written on a namespace,
// `namespace MANIPLE_API maniple {`, and applies to everything a header declares there.
#pragma once

#define MANIPLE_API [[gnu::visibility("default")]]
