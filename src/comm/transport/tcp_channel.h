// A byte channel over a TCP connection, or any connected stream socket. One end only writes, the other only reads.
#pragma once

#include <memory>
#include <string>

#include "comm/base/unique_fd.h"
#include "comm/transport/byte_channel.h"

namespace maniple {

struct TcpChannelOptions {
  int buffer_kib = 0;      ///< SO_SNDBUF or SO_RCVBUF; 0: tuned by the kernel
  std::string congestion;  ///< congestion control; empty: the system's, except bbr on a short path
  double heartbeat_s = 0;  ///< see set_liveness
  bool checksum = true;    ///< payloads sent carry a CRC-32C
};

/// Reads the options from the environment.
TcpChannelOptions tcp_channel_options();

/// Throws InvalidArgument if this system lacks that congestion control or forbids its use. Makes no connection.
void require_congestion(const std::string& name);

/// Both make the socket non-blocking and set TCP_NODELAY. A slow receiver is never treated as lost, however slow it is.
std::unique_ptr<ByteSink> make_tcp_sink(UniqueFd socket, const TcpChannelOptions& options = {});
std::unique_ptr<ByteSource> make_tcp_source(UniqueFd socket, const TcpChannelOptions& options = {});

}  // namespace maniple
