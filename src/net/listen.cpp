#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include <fmt/format.h>

#include "base/system_error.h"
#include "net/address.h"
#include "net/open_socket.h"
#include "net/port_holder.h"

namespace maniple {
namespace {

// A thousand ranks may dial in the same moment. The kernel lowers this to net.core.somaxconn.
constexpr int kBacklog = 4096;

[[noreturn]] void throw_bind_error(const Address& address, int code) {
  std::string text = fmt::format("listen on {}: {}", address.to_string(), errno_text(code));
  if (code == EADDRINUSE && !address.is_unix()) {
    if (const auto holder = describe_port_holder(address.port())) text += fmt::format("; it is held by {}", *holder);
    text += "; choose another port";
  }
  if (code == EADDRNOTAVAIL) text += "; this is not an address of this host";
  throw SystemError(text, code);
}

}  // namespace

UniqueFd listen_on(const Address& address) {
  UniqueFd fd = open_stream_socket(address.family(), fmt::format("listen on {}", address.to_string()));
  const int on = 1;
  if (!address.is_unix()) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.family() == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  if (::bind(fd.get(), address.get(), address.length()) != 0) throw_bind_error(address, errno);
  if (::listen(fd.get(), kBacklog) != 0) throw_bind_error(address, errno);
  return fd;
}

}  // namespace maniple
