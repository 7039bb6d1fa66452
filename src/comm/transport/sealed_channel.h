// Byte channels over data connections: plain, or in encrypted records (see comm/net/secure_connection.h) when the
// connection has keys, which MANIPLE_ENCRYPT=1 gives it.
#pragma once

#include <memory>

#include "comm/net/secure_connection.h"
#include "comm/transport/byte_channel.h"
#include "comm/transport/tcp_channel.h"

namespace maniple {

std::unique_ptr<ByteSink> make_data_sink(SecureConnection connection, const TcpChannelOptions& options);
std::unique_ptr<ByteSource> make_data_source(SecureConnection connection, const TcpChannelOptions& options);

/// Writes bytes to `sink` in encrypted records. Like a socket it accepts bytes before they have left, except the last
/// byte of each batch, which counts as written when the whole batch has left; a caller with more to write therefore
/// tries again. Bytes once offered must be offered again until they are accepted.
std::unique_ptr<ByteSink> make_sealed_sink(std::unique_ptr<ByteSink> sink, const ConnectionKeys& keys);
/// Decrypts the records that arrive from `source`. Returns no byte of a record before the whole record is
/// authenticated. Throws ProtocolError if it is not authentic.
std::unique_ptr<ByteSource> make_sealed_source(std::unique_ptr<ByteSource> source, const ConnectionKeys& keys);

}  // namespace maniple
