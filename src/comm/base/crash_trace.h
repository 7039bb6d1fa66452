// Prints the stack of a crashing thread (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT) on standard error, where the
// launcher picks it up for its report. The signal's effect is unchanged: exit status, core dump.
#pragma once

namespace maniple {

/// Installs the handlers, once per process, for each of these signals that has its default action. Handlers installed
/// by the program, Python or a sanitizer are kept. A direct call of abort() prints the stack, too. An uncaught
/// exception does not, because its text is more useful. Does nothing with MANIPLE_CRASH_TRACE=0.
void install_crash_trace();

}  // namespace maniple
