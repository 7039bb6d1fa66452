#include "launch/spawn/child_main.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <typeinfo>
#include <vector>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "comm/base/error_codec.h"
#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "launch/process/descriptors.h"

namespace maniple::launch {
namespace {

constexpr std::string_view kMagic = "maniple-spawn-1\n";
constexpr std::uint64_t kNoFunction = ~std::uint64_t{0};
constexpr int kBadStart = 2;

bool taken_over = false;  // set before any static object is constructed

/// The main program's layout in memory.
struct LoadedProgram {
  std::uintptr_t base = 0;
  std::uintptr_t address = 0;
  bool holds_address = false;
  std::uint64_t layout = 0;  // a hash of its segments' addresses and sizes
};

// dl_iterate_phdr lists the program itself first.
int look_at_first(dl_phdr_info* object, std::size_t, void* data) {
  auto& program = *static_cast<LoadedProgram*>(data);
  program.base = object->dlpi_addr;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = object->dlpi_phdr[i];
    for (const std::uint64_t number : {std::uint64_t{part.p_vaddr}, std::uint64_t{part.p_memsz}})
      program.layout = (program.layout ^ number) * 1099511628211u;  // FNV-1a
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    const std::uintptr_t begin = program.base + part.p_vaddr;
    if (program.address >= begin && program.address - begin < part.p_memsz) program.holds_address = true;
  }
  return 1;
}

LoadedProgram look_for(std::uintptr_t address) {
  LoadedProgram program{.address = address};
  ::dl_iterate_phdr(look_at_first, &program);
  return program;
}

void write_report(int fd, const SpawnReport& report) noexcept {
  try {
    (void)send_all(fd, encode_report(report));  // fails when the parent is gone
  } catch (...) {
  }
}

std::string read_payload(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) throw ProtocolError("the payload is not a file");
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw_system_error("reading the payload");
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

// Identifies the program that wrote the payload: nearly every build has segments of different sizes. (A constant of
// Maniple would not do, because it may lie in a shared library.)
std::uint64_t fingerprint() { return look_for(0).layout; }

// Started from /proc/self/exe, the process is named "exe"; give it the program's own name.
void take_name_of(const char* path) {
  if (path == nullptr) return;
  const char* slash = std::strrchr(path, '/');
  ::prctl(PR_SET_NAME, slash != nullptr ? slash + 1 : path);
}

int spawned_main(int, char** argv, char**) {
  try {
    const char* text = std::getenv(kSpawnVariable);
    const auto assignment = parse_spawn_assignment(text != nullptr ? text : "");
    if (!assignment) throw ProtocolError("it is for maniple::spawn alone and must not be set by hand");
    ::unsetenv(kSpawnVariable);
    for (const int fd : {assignment->payload, assignment->report, assignment->parent_pipe}) {
      if (fd >= 0 && ::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) throw_system_error("an inherited descriptor");
    }
    if (assignment->parent_pipe >= 0) die_with_parent(assignment->parent_pipe);
    take_name_of(argv[0]);

    const std::string payload = read_payload(assignment->payload);
    ::close(assignment->payload);
    ByteReader in(payload);
    if (in.left() < kMagic.size() || in.get_raw(kMagic.size()) != kMagic || in.get<std::uint64_t>() != fingerprint())
      throw ProtocolError("the payload is of another program");
    const auto entry = reinterpret_cast<detail::SpawnEntry>(function_at_offset(in.get<std::uint64_t>()));
    const auto function = in.get<std::uint64_t>();
    return run_spawned(entry, function == kNoFunction ? nullptr : function_at_offset(function), in.get_raw(in.left()),
                       assignment->index, assignment->report);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "maniple: %s: %s\n", kSpawnVariable, error.what());
    return kBadStart;
  }
}

}  // namespace

std::uint64_t offset_in_program(void (*function)()) {
  MANIPLE_REQUIRE(function != nullptr, "spawn: the function is a null pointer");
  const auto address = reinterpret_cast<std::uintptr_t>(function);
  const LoadedProgram program = look_for(address);
  if (program.holds_address) return address - program.base;
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
  if (!look_for(address).holds_address)
    throw ProtocolError(fmt::format("spawn: no function lies at {:#x} of this program", offset));
  return reinterpret_cast<void (*)()>(address);
}

std::string to_text(const SpawnAssignment& a) {
  return fmt::format("{},{},{},{}", a.payload, a.report, a.parent_pipe, a.index);
}

std::optional<SpawnAssignment> parse_spawn_assignment(std::string_view text) {
  int numbers[4];
  for (int i = 0; i < 4; ++i) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), numbers[i]);
    if (error != std::errc()) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (i < 3) {
      if (!text.starts_with(',')) return std::nullopt;
      text.remove_prefix(1);
    }
  }
  if (!text.empty() || numbers[0] < 0 || numbers[1] < 0 || numbers[2] < -1 || numbers[3] < 0) return std::nullopt;
  return SpawnAssignment{.payload = numbers[0], .report = numbers[1], .parent_pipe = numbers[2], .index = numbers[3]};
}

std::string encode_payload(detail::SpawnEntry entry, void (*function)(), std::string_view arguments) {
  ByteWriter out;
  out.put_raw(kMagic);
  out.put(fingerprint());
  out.put(offset_in_program(reinterpret_cast<void (*)()>(entry)));
  out.put(function == nullptr ? kNoFunction : offset_in_program(function));
  out.put_raw(arguments);
  return out.take();
}

bool takeover_is_possible() noexcept { return taken_over; }

int run_spawned(detail::SpawnEntry entry, void (*function)(), std::string_view arguments, int index, int report) {
  try {
    ArgumentReader reader(arguments);
    entry(function, reader, index);
  } catch (...) {
    write_report(report, report_of_current_exception());
    std::fflush(nullptr);
    ::_exit(1);  // without destructors: other threads may still use static objects
  }
  write_report(report, {.finished = true});
  return 0;
}

namespace {

constexpr std::uint8_t kFinished = 1;
constexpr std::uint8_t kThrew = 2;
constexpr std::size_t kMostType = 4 * 1024;
constexpr std::size_t kMostText = 12 * 1024;  // for `text` and for `error`, each

struct Free {
  void operator()(char* text) const noexcept { std::free(text); }
};

// "std::runtime_error", not "St13runtime_error".
std::string name_of_current_type() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "an exception of another language";
  int status = 0;
  const std::unique_ptr<char, Free> plain(abi::__cxa_demangle(type->name(), nullptr, nullptr, &status));
  return plain ? plain.get() : type->name();
}

}  // namespace

SpawnReport report_of_current_exception() noexcept {
  SpawnReport report;
  report.when_ns = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  try {
    report.type = name_of_current_type();
    throw;
  } catch (const Error& error) {
    report.error = error.info();
    report.text = error.what();
  } catch (const std::exception& error) {
    report.text = error.what();
  } catch (const std::string& text) {
    report.text = text;
  } catch (const char* text) {
    report.text = text != nullptr ? text : "";
  } catch (...) {
  }
  return report;
}

std::string encode_report(const SpawnReport& report) {
  ByteWriter out;
  out.put(report.finished ? kFinished : kThrew);
  out.put(report.when_ns);
  out.put_string(std::string_view(report.type).substr(0, kMostType));
  out.put_string(std::string_view(report.text).substr(0, kMostText));
  if (report.error) out.put_raw(encode_error(*report.error, kMostText));
  return out.take();
}

std::optional<SpawnReport> decode_report(std::string_view bytes) {
  try {
    ByteReader in(bytes);
    SpawnReport report;
    const auto what = in.get<std::uint8_t>();
    if (what != kFinished && what != kThrew) return std::nullopt;
    report.finished = what == kFinished;
    report.when_ns = in.get<std::int64_t>();
    report.type = in.get_string(kMostType);
    report.text = in.get_string(kMostText);
    if (in.left() > 0) report.error = decode_error(in.get_raw(in.left()));
    return report;
  } catch (const ProtocolError&) {
    return std::nullopt;
  }
}

ParentPipe::ParentPipe() {
  auto [reading, writing] = make_pipe();
  reading_ = std::move(reading);
  writing_ = kept_from_children(std::move(writing));
}

void die_with_parent(int parent_pipe) {
  // Reopened, because the signal's receiver is a property of the open file, which is shared with the other children.
  const int own = ::open(fmt::format("/proc/self/fd/{}", parent_pipe).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  const bool asked = own >= 0 && ::fcntl(own, F_SETOWN, ::getpid()) == 0 && ::fcntl(own, F_SETSIG, SIGKILL) == 0 &&
                     ::fcntl(own, F_SETFL, O_ASYNC | O_NONBLOCK) == 0;
  if (!asked) throw_system_error("spawn: asking to be killed with the parent");
  ::close(parent_pipe);
  // The parent may have ended already.
  pollfd state{own, POLLIN, 0};
  if (::poll(&state, 1, 0) > 0) ::raise(SIGKILL);
}

}  // namespace maniple::launch

maniple::detail::SpawnedMain maniple::detail::take_over_start() noexcept {
  launch::taken_over = true;
  return ::secure_getenv(launch::kSpawnVariable) != nullptr ? launch::spawned_main : nullptr;
}
