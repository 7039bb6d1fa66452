#include "plugins/nccl/nccl_library.h"

#include <dlfcn.h>

namespace maniple::nccl_plugin {
namespace {

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// The problem with the driver, if any. Does not initialise CUDA, because a process that did must not fork afterwards.
std::string driver_problem() {
  int driver = 0;
  if (::cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no NVIDIA driver";
  if (driver / 1000 < CUDART_VERSION / 1000)
    return "the NVIDIA driver is too old: it is made for CUDA " + cuda_version(driver) + ", this plugin for CUDA " +
           cuda_version(CUDART_VERSION);
  return {};
}

/// The start of the library that contains an address; null: none.
const void* library_of(const void* address) {
  Dl_info found{};
  return address != nullptr && ::dladdr(address, &found) != 0 ? found.dli_fbase : nullptr;
}

/// Resolves one function. Among global symbols (`library` is RTLD_DEFAULT), accepts only functions from the library
/// that has ncclGetVersion, so that functions of two NCCLs are never mixed.
template <class Function>
void take(void* library, const char* name, Function& function) {
  void* const found = ::dlsym(library, name);
  static const void* const global = library_of(::dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  if (library == RTLD_DEFAULT && library_of(found) != global) return;
  function = reinterpret_cast<Function>(found);
}

template <class Function>
void require(void* library, const char* name, Function& function, std::string& missing) {
  take(library, name, function);
  if (function == nullptr && missing.empty()) missing = std::string("libnccl.so.2 has no function ") + name;
}

NcclLibrary load() {
  NcclLibrary all;
  all.missing = driver_problem();
  if (!all.missing.empty()) return all;
  // Prefer an NCCL among the process's global symbols, even one inside another library, as in some LibTorch builds: a
  // second NCCL's calls could be bound to the first one's functions.
  void* library = RTLD_DEFAULT;
  const bool is_global = ::dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr;
  if (!is_global) library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!is_global && library == nullptr) {
    const char* const reason = ::dlerror();
    all.missing = "no libnccl.so.2: install NCCL 2.18 or later, or add its folder to LD_LIBRARY_PATH (";
    all.missing += std::string(reason != nullptr ? reason : "not found") + ")";
    return all;
  }
  take(library, "ncclGetVersion", all.get_version);
  if (all.get_version != nullptr) all.get_version(&all.version);
  if (all.version < kOldestNccl) {
    all.missing = "NCCL " + version_text(all.version) + " is too old: 2.18 or later is needed";
    return all;
  }
  require(library, "ncclGetUniqueId", all.get_unique_id, all.missing);
  require(library, "ncclCommInitRankConfig", all.comm_init, all.missing);
  require(library, "ncclCommDestroy", all.comm_destroy, all.missing);
  require(library, "ncclCommAbort", all.comm_abort, all.missing);
  require(library, "ncclCommGetAsyncError", all.async_error, all.missing);
  require(library, "ncclGetErrorString", all.error_string, all.missing);
  require(library, "ncclGetLastError", all.last_error, all.missing);
  require(library, "ncclGroupStart", all.group_start, all.missing);
  require(library, "ncclGroupEnd", all.group_end, all.missing);
  require(library, "ncclRedOpCreatePreMulSum", all.make_premultiplied, all.missing);
  require(library, "ncclRedOpDestroy", all.free_reduction, all.missing);
  require(library, "ncclBroadcast", all.broadcast, all.missing);
  require(library, "ncclReduce", all.reduce, all.missing);
  require(library, "ncclAllReduce", all.all_reduce, all.missing);
  require(library, "ncclAllGather", all.all_gather, all.missing);
  require(library, "ncclReduceScatter", all.reduce_scatter, all.missing);
  require(library, "ncclSend", all.send, all.missing);
  require(library, "ncclRecv", all.recv, all.missing);
  take(library, "ncclMemAlloc", all.mem_alloc);
  take(library, "ncclMemFree", all.mem_free);
  take(library, "ncclCommRegister", all.comm_register);
  take(library, "ncclCommDeregister", all.comm_deregister);
  take(library, "ncclCommWindowRegister", all.window_register);
  take(library, "ncclCommWindowDeregister", all.window_deregister);
  take(library, "ncclAlltoAll", all.all_to_all);
  take(library, "ncclGather", all.gather);
  take(library, "ncclScatter", all.scatter);
  return all;
}

}  // namespace

const NcclLibrary& nccl() {
  static const NcclLibrary* const library =
      new NcclLibrary(load());  // never destroyed: threads may use it while the process exits
  return *library;
}

std::string version_text(int version) {
  const int major = version < 10000 ? version / 1000 : version / 10000;  // 2.8 and earlier used another encoding
  const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

std::string describe(ncclResult_t result) {
  std::string text = nccl().error_string(result);
  const char* const last = nccl().last_error(nullptr);
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace maniple::nccl_plugin
