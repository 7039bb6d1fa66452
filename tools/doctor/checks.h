// The checks of `maniple doctor`. Each finding has a verdict, what was found and how to fix it, in one line each.
//
// A check consists of its facts, a pure function that judges them, a function that gathers them on this machine, and
// one line in the table checks(). Put a new check into the file of its subject.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace maniple::doctor {

enum class Verdict {
  ok,
  warn,  ///< works, but slowly or not in every case
  fail,  ///< training will not work
};
const char* to_string(Verdict verdict) noexcept;  ///< "ok", "warn", "FAIL"

struct Finding {
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string fix = {};  ///< empty when there is nothing to fix
};
using Findings = std::vector<Finding>;

/// "1.5 GiB"
std::string size_text(double bytes);

struct Check {
  const char* name;
  Findings (*run)();
};
std::span<const Check> checks() noexcept;

/// Runs a probe; returns its failure text, or an empty string.
template <class Attempt>
std::string problem_in(Attempt attempt) {
  try {
    attempt();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Checks of the kernel: shared memory and clocks.

// --- Memory that ranks on one host share, and how its descriptors are passed.

struct SharingFacts {
  std::string memfd_problem = {};  ///< creating, mapping and writing shared memory; empty: it works
  std::string pass_problem = {};   ///< passing a descriptor over a Unix socket (SCM_RIGHTS); empty: it works
  std::optional<std::uint64_t> dev_shm_bytes = std::nullopt;  ///< free in /dev/shm
  bool reads_peers = true;                                    ///< a process may read the memory of its sibling
};

Findings judge(const SharingFacts& facts);
SharingFacts inspect_sharing();

// --- Clocks. Deadlines use only the monotonic clock; a wrong date affects logs and certificates, not training.

struct ClockFacts {
  std::int64_t now = 0;       ///< seconds since 1970
  bool synchronised = false;  ///< according to the kernel
  std::string source = {};    ///< "tsc"; empty: unknown
  double read_ns = 0;         ///< time to read the monotonic clock
  bool goes_forward = true;
};

Findings judge(const ClockFacts& facts);
ClockFacts inspect_clock();

// --- The network: interfaces, the interface for data, loopback, listening, and OpenSSL.

struct Interface {
  std::string name;
  std::string address;
  bool up = false;
  bool loopback = false;
};

std::vector<Interface> list_interfaces();  ///< one entry per address

struct NetworkFacts {
  std::vector<Interface> interfaces;
  std::string chosen = {};          ///< MANIPLE_INTERFACE; empty: not set
  std::string chosen_problem = {};  ///< why it cannot be used
  std::string route = {};           ///< this host's address towards other networks; empty: no route
  std::string hostname = {};
  std::vector<std::string> hostname_addresses = {};
  std::string loopback_problem = {};  ///< connecting to 127.0.0.1; empty: it works
  std::string port_problem = {};      ///< listening on a free port; empty: it works
  std::string openssl_problem = {};   ///< loading OpenSSL, which every connection needs; empty: it works
};

Findings judge(const NetworkFacts& facts);
NetworkFacts inspect_network();

// Checks of resources: limits of the user and the container, cores, disk space.

// --- Limits of this user and this container: open files, memory, processes.

inline constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

struct LimitFacts {
  std::uint64_t files_soft = kUnlimited;
  std::uint64_t files_hard = kUnlimited;
  std::uint64_t locked_bytes = kUnlimited;
  std::uint64_t address_bytes = kUnlimited;
  std::uint64_t processes = kUnlimited;
  std::optional<std::uint64_t> memory_limit = std::nullopt;  ///< of the control group
  std::uint64_t memory_used = 0;
};

Findings judge(const LimitFacts& facts);
LimitFacts inspect_limits();

/// Parses "max" or a number; nullopt for other text. Version 1 of control groups writes a huge number for no limit.
std::optional<std::uint64_t> parse_group_limit(std::string_view text);

// --- Existing cores, usable cores, and settings that slow them down.

struct ProcessorFacts {
  int online = 1;                              ///< cores of the machine
  int allowed = 1;                             ///< cores allowed by this process's affinity
  std::optional<double> quota = std::nullopt;  ///< the control group's CPU quota, in cores
  std::string huge_pages = {};                 ///< "always", "madvise", "never"; empty: unknown
  std::string omp_threads = {};                ///< OMP_NUM_THREADS
};

Findings judge(const ProcessorFacts& facts);
ProcessorFacts inspect_processors();

/// "200000 100000" (version 2) -> 2; "max 100000" -> nullopt.
std::optional<double> parse_cpu_max(std::string_view text);
/// "always [madvise] never" -> "madvise"
std::string parse_choice(std::string_view text);

// --- Disk space for temporary files.

struct DiskFacts {
  std::string path;          ///< TMPDIR or /tmp
  std::string problem = {};  ///< why files cannot be written there; empty: they can
  std::uint64_t free_bytes = 0;
};

Findings judge(const DiskFacts& facts);
DiskFacts inspect_disk();

// Checks of installed software: BLAS, GPUs and their driver, plugin backends and other launchers.

// --- The BLAS library used by a LibTorch that does not bundle one (Debian's).

struct BlasFacts {
  std::string path;  ///< the target of libblas.so.3; empty: it is missing
};

Findings judge(const BlasFacts& facts);
BlasFacts inspect_blas();

// --- NVIDIA GPUs: devices, driver, permissions, installed libraries. Reads files only, so CUDA is not needed.

struct GpuFacts {
  int devices = 0;                        ///< /dev/nvidia0, 1, ...
  std::vector<std::string> models = {};   ///< "NVIDIA H200", one per GPU that the driver knows
  std::vector<std::string> refused = {};  ///< device files that this user may not open: "/dev/nvidia0"
  bool has_uvm = true;                    ///< /dev/nvidia-uvm exists
  std::string driver = {};                ///< "535.104.05"; empty: not loaded
  bool has_cuda = false;                  ///< libcuda.so.1 exists
  std::string mps = {};                   ///< path of nvidia-cuda-mps-control; empty: missing
  std::string nccl = {};                  ///< path of libnccl.so.2; empty: missing
  std::string toolkit = {};               ///< path of libcudart.so; empty: missing
  std::string visible = {};               ///< CUDA_VISIBLE_DEVICES
  bool visible_is_set = false;
};

Findings judge(const GpuFacts& facts);
GpuFacts inspect_gpus();

/// Parses /proc/driver/nvidia/version: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."
std::string parse_driver_version(const std::string& text);
/// Parses /proc/driver/nvidia/gpus/*/information: "Model: \t\t NVIDIA H200"; empty: no model is given.
std::string parse_gpu_model(const std::string& text);

// --- Other communication libraries and their launchers. All are optional.

struct InstalledBackend {
  std::string name;   ///< "Open MPI"
  std::string found;  ///< path; empty: missing
  std::string install;
};
using BackendFacts = std::vector<InstalledBackend>;

Findings judge(const BackendFacts& facts);
BackendFacts inspect_backends();

// Sources of facts: kernel files, directories, programs and libraries.

/// The first 4 KiB, without the line break at the end; nullopt when it cannot be read.
std::optional<std::string> read_small_file(const std::string& path);

std::vector<std::string> names_in(const std::string& directory);

/// The path with all symbolic links resolved; empty if it does not exist.
std::string real_path(const std::string& path);

std::vector<std::string> split(std::string_view text, char at);

/// The dynamic linker's search directories, in its order.
std::vector<std::string> library_directories();

/// The file that a library's name resolves to; empty if there is none.
std::string find_library(const std::string& name);

std::string find_program(const std::string& name);

}  // namespace maniple::doctor
