#include "spawn/child_function.h"

#include <dlfcn.h>
#include <link.h>

#include <fmt/format.h>

#include "base/check.h"

namespace maniple::launch {
namespace {

struct Program {
  std::uintptr_t base = 0;
  std::uintptr_t wanted = 0;
  bool holds_wanted = false;
};

// The first object that is listed is the program itself.
int look_at_first(dl_phdr_info* object, std::size_t, void* data) {
  auto& program = *static_cast<Program*>(data);
  program.base = object->dlpi_addr;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = object->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    const std::uintptr_t begin = program.base + part.p_vaddr;
    if (program.wanted >= begin && program.wanted - begin < part.p_memsz) program.holds_wanted = true;
  }
  return 1;
}

Program look_for(std::uintptr_t address) {
  Program program{.wanted = address};
  ::dl_iterate_phdr(look_at_first, &program);
  return program;
}

}  // namespace

std::uint64_t offset_in_program(void (*function)()) {
  MANIPLE_REQUIRE(function != nullptr, "spawn: the function is a null pointer");
  const auto address = reinterpret_cast<std::uintptr_t>(function);
  const Program program = look_for(address);
  if (program.holds_wanted) return address - program.base;
  Dl_info found{};
  const bool known = ::dladdr(reinterpret_cast<void*>(address), &found) != 0 && found.dli_fname != nullptr;
  throw InvalidArgument(
      fmt::format("spawn: the function lies in {}, not in the main program, so a new process cannot find it; call it "
                  "from a function of "
                  "the main program and spawn that",
                  known ? found.dli_fname : "memory of no library"));
}

void (*function_at_offset(std::uint64_t offset))() {
  const std::uintptr_t address = look_for(0).base + static_cast<std::uintptr_t>(offset);
  if (!look_for(address).holds_wanted)
    throw ProtocolError(fmt::format("spawn: no function lies at {:#x} of this program", offset));
  return reinterpret_cast<void (*)()>(address);
}

}  // namespace maniple::launch
