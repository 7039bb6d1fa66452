// NVIDIA GPUs: devices, driver, permission. Without CUDA: the kernel's files say enough.
#pragma once

#include <string>

#include "doctor/finding.h"

namespace maniple::doctor {

struct GpuFacts {
  int devices = 0;           ///< /dev/nvidia0, 1, ...
  int refused = 0;           ///< of these, not to be opened by this user
  std::string driver = {};   ///< "535.104.05"; empty: not loaded
  bool has_cuda = false;     ///< libcuda.so.1 is there
  std::string visible = {};  ///< CUDA_VISIBLE_DEVICES
  bool visible_is_set = false;
};

Findings judge(const GpuFacts& facts);
GpuFacts look_at_gpus();

/// From /proc/driver/nvidia/version: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."
std::string parse_driver_version(const std::string& text);

}  // namespace maniple::doctor
