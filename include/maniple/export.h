// MANIPLE_API marks what the shared libraries export. It stands on a namespace, `namespace MANIPLE_API maniple {`, and
// so on all that a header declares in it; everything else is hidden.
#pragma once

#define MANIPLE_API [[gnu::visibility("default")]]
