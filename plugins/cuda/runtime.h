// Implements Maniple's DeviceRuntime with CUDA: streams, events, pinned memory.
#pragma once

#include <string>

#include "comm/backend/device/device_plugin.h"

namespace maniple::cuda_plugin {

/// Also available without a driver; it then has no devices.
DeviceRuntime* runtime();

/// The UUID of the physical device or the MIG instance.
std::string device_id(int device);
/// Whether this process uses the Multi-Process Service, which runs kernels of several processes concurrently.
bool under_mps();

}  // namespace maniple::cuda_plugin
