// NCCL's functions, resolved at run time.
//
// The plugin is not linked with NCCL, so that it loads on machines without NCCL and can report what is missing. If the
// process has already loaded an NCCL (PyTorch brings its own), the plugin uses that one. Functions of later versions
// are null if the library lacks them. Their types are spelled out here, so that the plugin can be compiled with an
// older header.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <string>

namespace maniple::nccl_plugin {

inline constexpr int kOldestNccl = NCCL_VERSION(2, 18, 0);
static_assert(NCCL_VERSION_CODE >= kOldestNccl, "the nccl plugin needs the header of NCCL 2.18 or later");

struct NcclLibrary {
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclRedOpCreatePreMulSum) make_premultiplied = nullptr;
  decltype(&::ncclRedOpDestroy) free_reduction = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclReduce) reduce = nullptr;
  decltype(&::ncclAllReduce) all_reduce = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;

  // 2.19 and later
  ncclResult_t (*mem_alloc)(void** memory, std::size_t bytes) = nullptr;
  ncclResult_t (*mem_free)(void* memory) = nullptr;
  ncclResult_t (*comm_register)(ncclComm_t comm, void* memory, std::size_t bytes, void** handle) = nullptr;
  ncclResult_t (*comm_deregister)(ncclComm_t comm, void* handle) = nullptr;
  // 2.27 and later
  ncclResult_t (*window_register)(ncclComm_t comm, void* memory, std::size_t bytes, void** window, int flags) = nullptr;
  ncclResult_t (*window_deregister)(ncclComm_t comm, void* window) = nullptr;
  // 2.28 and later
  ncclResult_t (*all_to_all)(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                             cudaStream_t stream) = nullptr;
  ncclResult_t (*gather)(const void* in, void* out, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) = nullptr;
  ncclResult_t (*scatter)(const void* in, void* out, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                          cudaStream_t stream) = nullptr;

  int version = 0;      ///< of the library: 22809 is 2.28.9
  std::string missing;  ///< why NCCL cannot be used, in one line; empty if it can
};

/// Loaded by the first call, and kept until the process ends.
const NcclLibrary& nccl();

std::string version_text(int version);  ///< "2.28.9"

/// "unhandled system error (run with NCCL_DEBUG=INFO for details): connection refused"
std::string describe(ncclResult_t result);

}  // namespace maniple::nccl_plugin
