// Checks of what is installed: BLAS, GPUs and their driver, plugin backends and other launchers.
#pragma once

#include <string>
#include <vector>

#include "doctor/checks.h"

namespace maniple::doctor {

// --- Which library multiplies matrices for a LibTorch that brings none of its own (Debian's).

struct BlasFacts {
  std::string path;  ///< where libblas.so.3 leads to; empty: it is not there
};

Findings judge(const BlasFacts& facts);
BlasFacts inspect_blas();

// --- NVIDIA GPUs: devices, driver, permission. Without CUDA: the kernel's files say enough.

struct GpuFacts {
  int devices = 0;           ///< /dev/nvidia0, 1, ...
  int refused = 0;           ///< of these, not to be opened by this user
  std::string driver = {};   ///< "535.104.05"; empty: not loaded
  bool has_cuda = false;     ///< libcuda.so.1 is there
  std::string visible = {};  ///< CUDA_VISIBLE_DEVICES
  bool visible_is_set = false;
};

Findings judge(const GpuFacts& facts);
GpuFacts inspect_gpus();

/// From /proc/driver/nvidia/version: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."
std::string parse_driver_version(const std::string& text);

// --- Other engines that are installed: launchers and libraries. All of them are optional.

struct InstalledBackend {
  std::string name;   ///< "Open MPI"
  std::string found;  ///< path; empty: not there
  std::string install;
};
using BackendFacts = std::vector<InstalledBackend>;

Findings judge(const BackendFacts& facts);
BackendFacts inspect_backends();

}  // namespace maniple::doctor
