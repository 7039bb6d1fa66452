// Takes over the start of programs that link maniple::launch. A spawned process runs the same program, but its main
// must not run: the steps before spawn() (parsing options, loading data, writing files) must happen only once.
//
// The start-up code of every program calls the C library's __libc_start_main(main, ...). This file defines a function
// of that name, which the linker prefers. It calls the real function, with a different main in a spawned process. The C
// library constructs the static objects of the program and its libraries before it calls either main.
//
// This file is a separate library, so that a program that links only maniple::comm or maniple::train starts unchanged.
// Both symbols are weak: a statically linked program uses the C library's own function, and a program without spawn
// lacks take_over_start.
#include <dlfcn.h>
#include <unistd.h>

#include <maniple/launch/spawn.h>

namespace maniple::detail {
__attribute__((weak)) SpawnedMain take_over_start() noexcept;
}

extern "C" {

using ManipleStart = int (*)(maniple::detail::SpawnedMain, int, char**, void (*)(), void (*)(), void (*)(), void*);

// Runs before any static object exists: only call the C library here.
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
