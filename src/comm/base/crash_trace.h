// The stack of a thread that crashes (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT), on standard error, where the launcher
// takes it into its report. What the signal does is unchanged: exit status, core dump.
#pragma once

namespace maniple {

/// Installs the handlers, once in a process, for those signals that have their default action: never in place of one
/// that the program, Python or a sanitizer has installed. The stack is found where `abort` is called by hand, too, but
/// not shown for an exception that nobody caught: its text says more. Does nothing with MANIPLE_CRASH_TRACE=0.
void install_crash_trace();

}  // namespace maniple
