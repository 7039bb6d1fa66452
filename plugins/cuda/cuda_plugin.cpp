// The library's exported function.
#include "plugins/cuda/cuda_group.h"
#include "plugins/cuda/runtime.h"

namespace maniple::cuda_plugin {
namespace {

std::string missing() { return driver().missing; }

std::unique_ptr<DevicePlugin> make(const DeviceContext& context) { return std::make_unique<CudaGroup>(context); }

#define MANIPLE_TEXT_OF(value) #value
#define MANIPLE_TEXT(value) MANIPLE_TEXT_OF(value)
constexpr DevicePluginEntry kEntry = {kDevicePluginAbi, sizeof(Operation), "CUDA runtime " MANIPLE_TEXT(CUDART_VERSION),
                                      missing,          runtime,           make};

}  // namespace
}  // namespace maniple::cuda_plugin

extern "C" MANIPLE_API const maniple::DevicePluginEntry* maniple_device_plugin_entry() {
  return &maniple::cuda_plugin::kEntry;
}
