#include "harness/lossy_link.h"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>

#include <fmt/format.h>

#include "comm/base/system_error.h"
#include "comm/net/address.h"

namespace maniple::harness {
namespace {

constexpr const char* kPath = "/dev/net/tun";
constexpr const char* kDevice = "lossy";

/// The device belongs to the caller's network namespace and lives as long as the descriptor.
UniqueFd make_device() {
  UniqueFd fd(::open(kPath, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw_system_error(fmt::format("open {}", kPath));
  ifreq request{};
  std::strncpy(request.ifr_name, kDevice, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (::ioctl(fd.get(), TUNSETIFF, &request) != 0) throw_system_error(fmt::format("make a device of {}", kPath));
  return fd;
}

}  // namespace

std::string LossyLink::why_not() {
  const UniqueFd fd(::open(kPath, O_RDWR | O_CLOEXEC));
  return fd ? "" : fmt::format("cannot open {}: {}", kPath, errno_text(errno));
}

LossyLink::LossyLink(const bench::VirtualNetwork& network) : stop_(new_event()) {
  using bench::VirtualNetwork;
  for (int host = 0; host < network.hosts(); ++host) {
    {
      const bench::InsideNamespace inside(network.descriptor(host));
      devices_.push_back(make_device());
    }
    network.run_on(host, fmt::format("ip link set {} mtu 1500 txqueuelen 1000 up", kDevice));
    for (int other = 0; other < network.hosts(); ++other) {
      if (other == host) continue;
      network.run_on(host, fmt::format("ip route add {} dev {} src {}", VirtualNetwork::address(other), kDevice,
                                       VirtualNetwork::address(host)));
    }
  }
  thread_ = std::thread([this] { run(); });
}

LossyLink::~LossyLink() {
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
}

void LossyLink::lose(double fraction, std::chrono::duration<double> duration) {
  using Clock = std::chrono::steady_clock;
  fraction_ = fraction;
  until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration);
}

void LossyLink::run() {
  std::vector<pollfd> polls;
  for (const UniqueFd& device : devices_) polls.push_back({device.get(), POLLIN, 0});
  polls.push_back({stop_.get(), POLLIN, 0});
  for (;;) {
    if (::poll(polls.data(), polls.size(), -1) < 0) continue;
    if (polls.back().revents != 0) return;
    for (int host = 0; host < static_cast<int>(devices_.size()); ++host) {
      if (polls[static_cast<std::size_t>(host)].revents != 0) forward(host);
    }
  }
}

void LossyLink::forward(int from) {
  thread_local std::mt19937 random(1);
  std::array<char, 2048> packet;
  for (int burst = 0; burst < 64; ++burst) {
    const ssize_t bytes = ::read(devices_[static_cast<std::size_t>(from)].get(), packet.data(), packet.size());
    if (bytes < static_cast<ssize_t>(sizeof(iphdr))) return;
    iphdr header;
    std::memcpy(&header, packet.data(), sizeof header);
    if (header.version != 4) continue;  // what IPv6 sends of its own accord
    std::array<unsigned char, 4> to;
    std::memcpy(to.data(), &header.daddr, to.size());
    const std::string target = fmt::format("{}.{}.{}.{}", to[0], to[1], to[2], to[3]);
    const bool lossy = std::chrono::steady_clock::now() < until_.load();
    if (lossy && std::uniform_real_distribution<>(0, 1)(random) < fraction_) {
      ++lost_;
      continue;
    }
    for (int host = 0; host < static_cast<int>(devices_.size()); ++host) {
      if (target != bench::VirtualNetwork::address(host)) continue;
      // A full queue drops the packet, as a router's does.
      const ssize_t written =
          ::write(devices_[static_cast<std::size_t>(host)].get(), packet.data(), static_cast<std::size_t>(bytes));
      (void)written;
    }
  }
}

}  // namespace maniple::harness
