#include "comm/net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <set>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

constexpr std::string_view kUnixPrefix = "unix:@";

template <class T>
T& as(sockaddr_storage& storage) noexcept {
  return reinterpret_cast<T&>(storage);
}
template <class T>
const T& as(const sockaddr_storage& storage) noexcept {
  return reinterpret_cast<const T&>(storage);
}

bool parse_literal(const std::string& host, sockaddr_storage& storage, socklen_t& length) {
  if (inet_pton(AF_INET, host.c_str(), &as<sockaddr_in>(storage).sin_addr) == 1) {
    storage.ss_family = AF_INET;
    length = sizeof(sockaddr_in);
    return true;
  }
  if (inet_pton(AF_INET6, host.c_str(), &as<sockaddr_in6>(storage).sin6_addr) == 1) {
    storage.ss_family = AF_INET6;
    length = sizeof(sockaddr_in6);
    return true;
  }
  return false;
}

/// IPv4 before IPv6 before link-local IPv6. A link-local address needs a scope, which differs between hosts.
int preference(const sockaddr* address) {
  if (address->sa_family == AF_INET) return 0;
  sockaddr_in6 v6;
  std::memcpy(&v6, address, sizeof(v6));
  return IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr) ? 2 : 1;
}

}  // namespace

Address Address::from_raw(const sockaddr* address, socklen_t length) {
  Address result;
  MANIPLE_ASSERT(length <= sizeof(result.storage_));
  std::memcpy(&result.storage_, address, length);
  result.length_ = length;
  return result;
}

Address Address::unix_abstract(std::string_view name) {
  Address result;
  auto& address = as<sockaddr_un>(result.storage_);
  MANIPLE_REQUIRE(!name.empty() && name.size() < sizeof(address.sun_path),
                  "the abstract socket name \"{}\" has {} bytes; expected 1 to {}", name, name.size(),
                  sizeof(address.sun_path) - 1);
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  result.length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

Address Address::of_socket(int fd) {
  Address result;
  result.length_ = sizeof(result.storage_);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&result.storage_), &result.length_) != 0) {
    throw_system_error("getsockname");
  }
  return result;
}

Address Address::of_peer(int fd) {
  Address result;
  result.length_ = sizeof(result.storage_);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&result.storage_), &result.length_) != 0) {
    throw_system_error("getpeername");
  }
  return result;
}

Address Address::parse(std::string_view text) {
  if (text.starts_with(kUnixPrefix)) return unix_abstract(text.substr(kUnixPrefix.size()));
  const auto colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == std::string_view::npos ? text.size() : colon);
  std::uint16_t port = 0;
  bool good = colon != std::string_view::npos;
  if (good) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    good = error == std::errc() && end == digits.data() + digits.size();
  }
  const bool bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  // An IPv6 literal without brackets is ambiguous: its last group looks like a port.
  if (!bracketed && host.find(':') != std::string_view::npos) good = false;

  Address result;
  MANIPLE_REQUIRE(good && parse_literal(std::string(host), result.storage_, result.length_),
                  "\"{}\" is not an address; expected 10.0.0.1:80, [::1]:80 or unix:@name", text);
  return result.with_port(port);
}

Address Address::of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw_system_error("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);

  const sockaddr* best = nullptr;
  std::set<std::string> names;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* address = entry->ifa_addr;
    if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) continue;
    names.insert(entry->ifa_name);
    if (name != entry->ifa_name) continue;
    if (best == nullptr || preference(address) < preference(best)) best = address;
  }
  MANIPLE_REQUIRE(best != nullptr, "there is no network interface \"{}\" with an address; there are: {}", name,
                  joined(names));
  return from_raw(best, best->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)).with_port(0);
}

bool Address::is_loopback() const noexcept {
  switch (family()) {
    case AF_INET: return (ntohl(as<sockaddr_in>(storage_).sin_addr.s_addr) >> 24) == 127;
    case AF_INET6: {
      const in6_addr& v6 = as<sockaddr_in6>(storage_).sin6_addr;
      return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
    }
    case AF_UNIX: return true;
    default: return false;
  }
}

bool Address::is_wildcard() const noexcept {
  switch (family()) {
    case AF_INET: return as<sockaddr_in>(storage_).sin_addr.s_addr == htonl(INADDR_ANY);
    case AF_INET6: {
      const in6_addr& v6 = as<sockaddr_in6>(storage_).sin6_addr;
      return IN6_IS_ADDR_UNSPECIFIED(&v6);
    }
    default: return false;
  }
}

std::uint16_t Address::port() const noexcept {
  switch (family()) {
    case AF_INET: return ntohs(as<sockaddr_in>(storage_).sin_port);
    case AF_INET6: return ntohs(as<sockaddr_in6>(storage_).sin6_port);
    default: return 0;
  }
}

Address Address::with_port(std::uint16_t port) const {
  Address result = *this;
  if (family() == AF_INET) as<sockaddr_in>(result.storage_).sin_port = htons(port);
  if (family() == AF_INET6) as<sockaddr_in6>(result.storage_).sin6_port = htons(port);
  return result;
}

std::string Address::host() const {
  char text[INET6_ADDRSTRLEN + IF_NAMESIZE + 2] = {};
  switch (family()) {
    case AF_INET: return ::inet_ntop(AF_INET, &as<sockaddr_in>(storage_).sin_addr, text, sizeof(text));
    case AF_INET6: return ::inet_ntop(AF_INET6, &as<sockaddr_in6>(storage_).sin6_addr, text, sizeof(text));
    case AF_UNIX: {
      const auto header = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1);
      if (length_ <= header) return "unix:";  // the dialling end is unnamed
      return std::string(kUnixPrefix) + std::string(as<sockaddr_un>(storage_).sun_path + 1, length_ - header);
    }
    default: return "nowhere";
  }
}

std::string Address::to_string() const {
  switch (family()) {
    case AF_INET: return fmt::format("{}:{}", host(), port());
    case AF_INET6: return fmt::format("[{}]:{}", host(), port());
    default: return host();
  }
}

}  // namespace maniple
