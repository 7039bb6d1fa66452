// A TCP connection (or any connected stream socket) as a channel of bytes. One end only writes, the other only reads.
#pragma once

#include <memory>
#include <string>

#include "comm/base/unique_fd.h"
#include "comm/transport/byte_channel.h"

namespace maniple {

struct TcpChannelOptions {
  int buffer_kib = 0;      ///< SO_SNDBUF or SO_RCVBUF; 0: the kernel's own tuning
  std::string congestion;  ///< name of the congestion control; empty: the system's, but not bbr on a short path
  double heartbeat_s = 0;  ///< see set_liveness
  bool checksum = true;    ///< of what is sent: payloads carry a CRC-32C
};

/// From the environment.
TcpChannelOptions tcp_channel_options();

/// Throws InvalidArgument when this system has or allows no congestion control of that name. No connection is made.
void require_congestion(const std::string& name);

/// Both make the socket non-blocking and send without delay. A receiver that is late is not lost, however late it is.
std::unique_ptr<ByteSink> make_tcp_sink(UniqueFd socket, const TcpChannelOptions& options = {});
std::unique_ptr<ByteSource> make_tcp_source(UniqueFd socket, const TcpChannelOptions& options = {});

}  // namespace maniple
