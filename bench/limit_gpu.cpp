// The limit of all_reduce among ranks that share a GPU, for `maniple bench gpu`: all ranks map the memory, and one
// kernel per rank waits for the other ranks' kernels, adds, and writes the sum to all ranks. Without checks, deadlines
// or a stop flag, so a real implementation cannot be much faster.
//
//   limit_gpu RANKS SIZES ROUNDS MILLISECONDS          under MPS, as kernels of all ranks must run at the same time
//
// The program forks its ranks. It deliberately avoids Maniple's communication code.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/forked_ranks.h"
#include "bench/limit_gpu.h"
#include "tools/bench/work_item.h"

namespace maniple::bench {
namespace {

using Clock = std::chrono::steady_clock;

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}
void check(CUresult code, const char* call) {
  const char* text = nullptr;
  if (code == CUDA_SUCCESS) return;
  cuGetErrorString(code, &text);
  throw std::runtime_error(std::string(call) + ": " + (text != nullptr ? text : "unknown error"));
}
#define CHECK(call) check(call, #call)

// ---- Passing memory descriptors between ranks -----------------------------------------------------------------------

/// One socket per pair of sender and receiver, created before the ranks are forked.
struct Sockets {
  int ends[kMostRanks][kMostRanks][2];
  explicit Sockets(int ranks) {
    for (int from = 0; from < ranks; ++from) {
      for (int to = 0; to < ranks; ++to) {
        if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends[from][to]) != 0) throw std::runtime_error("socketpair failed");
      }
    }
  }
};

union ControlBytes {
  cmsghdr aligned;
  char bytes[CMSG_SPACE(sizeof(int))];
};

void send_descriptor(int socket, int descriptor) {
  char byte = 0;
  iovec content{&byte, 1};
  ControlBytes control{};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  if (sendmsg(socket, &message, 0) != 1) throw std::runtime_error("sendmsg of a descriptor failed");
}

int receive_descriptor(int socket) {
  char byte = 0;
  iovec content{&byte, 1};
  ControlBytes control{};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  int descriptor = -1;
  if (recvmsg(socket, &message, 0) != 1 || CMSG_FIRSTHDR(&message) == nullptr)
    throw std::runtime_error("recvmsg of a descriptor failed");
  std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
  return descriptor;
}

/// Each rank allocates its memory and maps the other ranks' memory. Never unmapped.
MappedRanks map_all(int ranks, int self, std::size_t bytes, const Sockets& sockets) {
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  std::size_t unit = 0;
  CHECK(cuMemGetAllocationGranularity(&unit, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  const std::size_t size = (bytes + sizeof(Arrivals) + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle own{};
  CHECK(cuMemCreate(&own, size, &kind, 0));
  int descriptor = -1;
  CHECK(cuMemExportToShareableHandle(&descriptor, own, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  for (int to = 0; to < ranks; ++to) {
    if (to != self) send_descriptor(sockets.ends[self][to][0], descriptor);
  }
  CUmemAccessDesc access{};
  access.location = kind.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  MappedRanks all{};
  all.count = ranks;
  all.self = self;
  for (int from = 0; from < ranks; ++from) {
    CUmemGenericAllocationHandle memory = own;
    if (from != self) {
      const int received = receive_descriptor(sockets.ends[from][self][1]);
      CHECK(cuMemImportFromShareableHandle(&memory, reinterpret_cast<void*>(static_cast<std::intptr_t>(received)),
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
      close(received);
    }
    CUdeviceptr address = 0;
    CHECK(cuMemAddressReserve(&address, size, 0, 0, 0));
    CHECK(cuMemMap(address, size, 0, memory, 0));
    CHECK(cuMemSetAccess(address, size, &access, 1));
    all.data[from] = reinterpret_cast<float4*>(address);
    all.arrivals[from] = reinterpret_cast<Arrivals*>(address + bytes);
  }
  CHECK(cudaMemset(all.data[self], 0, size));
  CHECK(cudaDeviceSynchronize());
  return all;
}

// ---- Measuring ------------------------------------------------------------------------------------------------------

struct Request {
  int ranks = 2;
  std::vector<std::uint64_t> sizes;
  int rounds = 5;
  double milliseconds = 40;
};

double measure(int rank, const Request& request, SharedLargest& agreement, const std::function<void()>& call,
               cudaStream_t stream) {
  const auto time = [&](std::uint64_t calls) {
    agreement.of(rank, 0);
    const auto start = Clock::now();
    for (std::uint64_t i = 0; i < calls; ++i) call();
    CHECK(cudaStreamSynchronize(stream));
    const auto own = static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
    return static_cast<double>(agreement.of(rank, own)) / static_cast<double>(calls) / 1e3;
  };
  time(3);
  const double guess_us = std::max(time(10), 0.1);
  const auto calls =
      std::min<std::uint64_t>(500, 2 + static_cast<std::uint64_t>(request.milliseconds * 1e3 / guess_us));
  std::vector<double> rounds;
  for (int i = 0; i < request.rounds; ++i) rounds.push_back(time(calls));
  std::sort(rounds.begin(), rounds.end());
  return rounds[rounds.size() / 2];
}

void run(int rank, const Request& request, const Sockets& sockets, SharedLargest agreement) {
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(nullptr));  // creates the context for the driver functions below
  int processors = 0;
  CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  const std::size_t most = *std::max_element(request.sizes.begin(), request.sizes.end());
  const MappedRanks ranks = map_all(request.ranks, rank, (most + 255) / 256 * 256, sockets);
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  unsigned number = 0;
  for (const std::size_t bytes : request.sizes) {
    const std::size_t count = std::max<std::size_t>(1, bytes / sizeof(float4)),
                      n = static_cast<std::size_t>(request.ranks);
    const std::size_t each = (count + n - 1) / n, begin = std::min(count, each * static_cast<std::size_t>(rank));
    const std::size_t end = std::min(count, begin + each);
    double best = 0;
    // One or two blocks per multiprocessor, over all ranks together: the faster variant counts.
    for (const int share : {1, 2}) {
      const auto room = static_cast<std::size_t>(std::clamp(share * processors / request.ranks, 1, kMaxBlocks));
      const int blocks = static_cast<int>(std::clamp<std::size_t>((each + kThreads - 1) / kThreads, 1, room));
      const double us = measure(
          rank, request, agreement, [&] { CHECK(enqueue_reduce(ranks, begin, end, ++number, blocks, stream)); },
          stream);
      best = best == 0 ? us : std::min(best, us);
    }
    if (rank == 0) {
      const nlohmann::ordered_json row = {{"case", "all_reduce"},   {"system", "limit"}, {"kind", "registered"},
                                          {"ranks", request.ranks}, {"bytes", bytes},    {"us", best}};
      std::printf("%s\n", row.dump().c_str());
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) try {
  using namespace maniple::bench;
  Request request;
  if (argc == 5) {
    request = {std::atoi(argv[1]), parse_sizes(argv[2]), std::atoi(argv[3]), std::atof(argv[4])};
  }
  const int ranks = request.ranks;
  if (argc != 5 || request.sizes.empty() || (ranks != 1 && ranks != 2 && ranks != 4 && ranks != 8)) {
    std::fprintf(stderr, "usage: limit_gpu 1|2|4|8 SIZES ROUNDS MILLISECONDS\n");
    return 2;
  }
  // The launcher knows only one process and gives it all the GPU's queues. If every rank used that many, some could not
  // start.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(std::max(2, 32 / ranks)).c_str(), 1);
  const Sockets sockets(ranks);
  const SharedLargest agreement(ranks);
  return run_forked(ranks, [&](int rank) {
    try {
      run(rank, request, sockets, agreement);
    } catch (const std::exception& error) {
      // The other ranks would wait for this one. They end with rank 0, which has forked them.
      std::fprintf(stderr, "limit_gpu: rank %d: %s\n", rank, error.what());
      if (rank != 0) kill(getppid(), SIGKILL);
      _exit(1);
    }
  });
} catch (const std::exception& error) {
  std::fprintf(stderr, "limit_gpu: %s\n", error.what());
  return 1;
}
