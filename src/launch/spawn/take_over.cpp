// The start of a program that links maniple::launch. A process that spawn starts is this program once more, but its
// main must not run: what main does before it calls spawn (parse options, load data, write files) happens once. The
// start-up code of every program calls __libc_start_main(main, ...) of the C library. Here is a function of that name,
// which the linker prefers. It calls the real one, in a spawned process with another main. The C library constructs the
// static objects of the program and its libraries before it calls either.
//
// This file is a library of its own, so that a program that links maniple::comm or maniple::train alone starts as it
// would without Maniple. Both symbols are weak: a statically linked program takes the C library's own function, a
// program without spawn has no take_over_start.
#include <dlfcn.h>
#include <unistd.h>

#include <maniple/launch/spawn.h>

namespace maniple::detail {
__attribute__((weak)) SpawnedMain take_over_start() noexcept;
}

extern "C" {

using ManipleStart = int (*)(maniple::detail::SpawnedMain, int, char**, void (*)(), void (*)(), void (*)(), void*);

// Runs before any static object exists: nothing but calls into the C library here.
__attribute__((weak, visibility("default"))) int __libc_start_main(maniple::detail::SpawnedMain program, int argc,
                                                                   char** argv, void (*init)(), void (*fini)(),
                                                                   void (*rtld_fini)(), void* stack_end) {
  const auto start = reinterpret_cast<ManipleStart>(::dlsym(RTLD_NEXT, "__libc_start_main"));
  if (start == nullptr) {
    constexpr char kText[] = "maniple: the C library has no __libc_start_main\n";
    (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
    ::_exit(127);
  }
  if (&maniple::detail::take_over_start != nullptr) {
    if (const auto spawned = maniple::detail::take_over_start()) program = spawned;
  }
  return start(program, argc, argv, init, fini, rtld_fini, stack_end);
}

}  // extern "C"
