// CUDA as Maniple's DeviceRuntime: streams, events, pinned memory.
#pragma once

#include <string>

#include "comm/backend/device/device_plugin.h"

namespace maniple::cuda_plugin {

/// Where there is no driver, too: it has no devices then.
DeviceRuntime* runtime();

/// Of the physical device, or of the MIG instance: its UUID.
std::string device_id(int device);
/// Whether this process computes through the Multi-Process Service, by which kernels of several processes run side by
/// side.
bool under_mps();

}  // namespace maniple::cuda_plugin
