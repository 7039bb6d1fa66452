#include "comm/base/host.h"

#include <sched.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <charconv>
#include <climits>
#include <memory>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "comm/base/environment.h"
#include "comm/base/files.h"

namespace maniple {
namespace {

constexpr std::size_t kWordBits = 64;

}  // namespace

CoreSet CoreSet::of_this_process() {
  const auto bytes = CPU_ALLOC_SIZE(kMostCores);
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(CPU_ALLOC(kMostCores),
                                                              [](cpu_set_t* set) { CPU_FREE(set); });
  if (!mask) return {};
  CPU_ZERO_S(bytes, mask.get());
  if (::sched_getaffinity(0, bytes, mask.get()) != 0) return {};
  std::vector<int> cores;
  for (std::size_t core = 0; core < kMostCores; ++core) {
    if (CPU_ISSET_S(core, bytes, mask.get())) cores.push_back(static_cast<int>(core));
  }
  return of(cores);
}

CoreSet CoreSet::of(const std::vector<int>& cores) {
  CoreSet set;
  for (const int core : cores) {
    MANIPLE_ASSERT(core >= 0 && static_cast<std::size_t>(core) < kMostCores);
    const std::size_t place = core;
    if (set.words_.size() <= place / kWordBits) set.words_.resize(place / kWordBits + 1);
    set.words_[place / kWordBits] |= std::uint64_t{1} << (place % kWordBits);
  }
  return set;
}

int CoreSet::count() const noexcept {
  int sum = 0;
  for (const std::uint64_t word : words_) sum += std::popcount(word);
  return sum;
}

std::vector<int> CoreSet::list() const {
  std::vector<int> cores;
  for (std::size_t place = 0; place < words_.size() * kWordBits; ++place) {
    if ((words_[place / kWordBits] >> (place % kWordBits) & 1) != 0) cores.push_back(static_cast<int>(place));
  }
  return cores;
}

void CoreSet::add(const CoreSet& other) {
  if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
  for (std::size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
}

CoreSet CoreSet::physical(const std::string& folder) const {
  std::vector<int> first;
  for (const int core : list()) {
    // "0,16" or "0-1", in ascending order.
    const std::string siblings = file_text(fmt::format("{}/cpu{}/topology/thread_siblings_list", folder, core));
    int lowest = core;
    std::from_chars(siblings.data(), siblings.data() + siblings.size(), lowest);
    first.push_back(lowest >= 0 && lowest <= core ? lowest : core);
  }
  return of(first);
}

std::string CoreSet::encode() const {
  ByteWriter writer;
  for (const std::uint64_t word : words_) writer.put(word);
  return writer.take();
}

CoreSet CoreSet::decode(std::string_view bytes) {
  if (bytes.size() % sizeof(std::uint64_t) != 0 || bytes.size() > kMostCores / 8) {
    throw ProtocolError(fmt::format("a set of cores in {} bytes", bytes.size()));
  }
  CoreSet set;
  ByteReader reader(bytes);
  while (reader.left() != 0) set.words_.push_back(reader.get<std::uint64_t>());
  if (!set.words_.empty() && set.words_.back() == 0) throw ProtocolError("a set of cores that ends in zeros");
  return set;
}

namespace {

std::string first_line(const char* path) {
  const std::string text = file_text(path);
  return text.substr(0, text.find('\n'));
}

std::string link_target(const char* path) {
  std::array<char, 64> text{};
  const auto length = ::readlink(path, text.data(), text.size());
  return length > 0 ? std::string(text.data(), length) : std::string();
}

}  // namespace

HostIdentity host_identity() {
  HostIdentity host;
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  host.name = name.data();
  const std::string claimed = knob_text(Knob::host);
  if (!claimed.empty()) {
    host.key.assign("claimed:").append(claimed);
    host.name = claimed;
    return host;
  }
  host.key = first_line("/proc/sys/kernel/random/boot_id");
  for (const char* space : {"/proc/self/ns/net", "/proc/self/ns/ipc", "/proc/self/ns/user"}) {
    host.key.append(1, ',').append(link_target(space));
  }
  return host;
}

}  // namespace maniple
