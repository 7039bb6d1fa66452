// The checks of `maniple doctor`, and what a check says: a verdict, what was found, and how to fix it, in one line
// each.
//
// A new check has three things (the facts, a pure function that judges them, and one that gathers them on this machine)
// in the file of its matter, and one line in the table.
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
  warn,  ///< works, but slowly, or not in every case
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

/// An attempt whose failure is a finding, not an error: what goes wrong in it; empty: nothing.
template <class Attempt>
std::string problem_in(Attempt attempt) {
  try {
    attempt();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Checks of what the kernel does for a job: shared memory and clocks.

// --- Memory that ranks of one host share, and the way it is handed over.

struct SharingFacts {
  std::string memfd_problem = {};  ///< making, mapping and writing shared memory; empty: it works
  std::string pass_problem = {};   ///< a descriptor over a Unix socket (SCM_RIGHTS)
  std::optional<std::uint64_t> dev_shm_bytes = std::nullopt;  ///< free in /dev/shm
  bool reads_peers = true;  ///< a process may read the memory of another one that the same parent started
};

Findings judge(const SharingFacts& facts);
SharingFacts inspect_sharing();

// --- Clocks. Deadlines use the monotonic one only; a wrong date spoils logs and certificates, not training.

struct ClockFacts {
  std::int64_t now = 0;       ///< seconds after 1970
  bool synchronised = false;  ///< the kernel thinks so
  std::string source = {};    ///< "tsc"; empty: not known
  double read_ns = 0;         ///< time that reading the monotonic clock takes
  bool goes_forward = true;
};

Findings judge(const ClockFacts& facts);
ClockFacts inspect_clock();

/// Interfaces, the one that data would use, loopback, whether a port can be listened on, and OpenSSL.
struct Interface {
  std::string name;
  std::string address;
  bool up = false;
  bool loopback = false;
};

std::vector<Interface> list_interfaces();  ///< an entry for each address

struct NetworkFacts {
  std::vector<Interface> interfaces;
  std::string chosen = {};          ///< MANIPLE_INTERFACE; empty: not set
  std::string chosen_problem = {};  ///< why it cannot be used
  std::string route = {};           ///< the address towards other networks; empty: no route
  std::string hostname = {};
  std::vector<std::string> hostname_addresses = {};
  std::string loopback_problem = {};  ///< connecting to 127.0.0.1; empty: it works
  std::string port_problem = {};      ///< listening on a free port; empty: it works
  std::string openssl_problem = {};   ///< loading it, which every connection needs; empty: it works
};

Findings judge(const NetworkFacts& facts);
NetworkFacts inspect_network();

// Checks of what this machine lets a job have: limits of the user and the container, cores, room on disk.

// --- What the system allows this user and this container: open files, memory, processes.

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

/// "max", a number, or nonsense (nullopt). The first version of control groups writes a huge number for no limit.
std::optional<std::uint64_t> parse_group_limit(std::string_view text);

// --- Cores that are there, cores that may be used, and what makes them slow.

struct ProcessorFacts {
  int online = 1;                              ///< of the machine
  int allowed = 1;                             ///< by the affinity of this process
  std::optional<double> quota = std::nullopt;  ///< cores' worth of time that the control group may use
  std::string huge_pages = {};                 ///< "always", "madvise", "never"; empty: not known
  std::string omp_threads = {};                ///< OMP_NUM_THREADS
};

Findings judge(const ProcessorFacts& facts);
ProcessorFacts inspect_processors();

/// "200000 100000" (version 2) -> 2; "max 100000" -> nullopt.
std::optional<double> parse_cpu_max(std::string_view text);
/// "always [madvise] never" -> "madvise"
std::string parse_choice(std::string_view text);

// --- Room for temporary files.

struct DiskFacts {
  std::string path;          ///< TMPDIR or /tmp
  std::string problem = {};  ///< why nothing can be written there
  std::uint64_t free_bytes = 0;
};

Findings judge(const DiskFacts& facts);
DiskFacts inspect_disk();

// Checks of what is installed: BLAS, GPUs and their driver, plugin backends and other launchers.

// --- Which library multiplies matrices for a LibTorch that brings none of its own (Debian's).

struct BlasFacts {
  std::string path;  ///< where libblas.so.3 leads to; empty: it is not there
};

Findings judge(const BlasFacts& facts);
BlasFacts inspect_blas();

// --- NVIDIA GPUs: devices, driver, permission, what is installed for them. Without CUDA: files say enough.

struct GpuFacts {
  int devices = 0;                        ///< /dev/nvidia0, 1, ...
  std::vector<std::string> models = {};   ///< "NVIDIA H200", one for each GPU that the driver knows
  std::vector<std::string> refused = {};  ///< device files that this user may not open: "/dev/nvidia0"
  bool has_uvm = true;                    ///< /dev/nvidia-uvm is there
  std::string driver = {};                ///< "535.104.05"; empty: not loaded
  bool has_cuda = false;                  ///< libcuda.so.1 is there
  std::string mps = {};                   ///< path of nvidia-cuda-mps-control; empty: not there. So are the next two:
  std::string nccl = {};                  ///< of libnccl.so.2
  std::string toolkit = {};               ///< of libcudart.so
  std::string visible = {};               ///< CUDA_VISIBLE_DEVICES
  bool visible_is_set = false;
};

Findings judge(const GpuFacts& facts);
GpuFacts inspect_gpus();

/// From /proc/driver/nvidia/version: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."
std::string parse_driver_version(const std::string& text);
/// From /proc/driver/nvidia/gpus/*/information: "Model: \t\t NVIDIA H200"; empty: it does not say.
std::string parse_gpu_model(const std::string& text);

// --- Other communication libraries that are installed, and their launchers. All of them are optional.

struct InstalledBackend {
  std::string name;   ///< "Open MPI"
  std::string found;  ///< path; empty: not there
  std::string install;
};
using BackendFacts = std::vector<InstalledBackend>;

Findings judge(const BackendFacts& facts);
BackendFacts inspect_backends();

// Small files of the kernel, names in directories, programs and libraries: where the checks find their facts.

/// The first 4 KiB, without the line break at the end; nullopt when it cannot be read.
std::optional<std::string> read_small_file(const std::string& path);

std::vector<std::string> names_in(const std::string& directory);

/// Where the way through links ends; empty when it leads nowhere.
std::string real_path(const std::string& path);

std::vector<std::string> split(std::string_view text, char at);

/// Where the dynamic linker looks, in its order.
std::vector<std::string> library_directories();

/// The file that a library's name leads to; empty when there is none.
std::string find_library(const std::string& name);

std::string find_program(const std::string& name);

}  // namespace maniple::doctor
