// Data connections between ranks as channels of bytes: as they are, or in records (see comm/net/secure_connection.h)
// where the connection has keys, which is where MANIPLE_ENCRYPT is 1.
#pragma once

#include <memory>

#include "comm/net/secure_connection.h"
#include "comm/transport/byte_channel.h"
#include "comm/transport/tcp_channel.h"

namespace maniple {

std::unique_ptr<ByteSink> make_data_sink(SecureConnection connection, const TcpChannelOptions& options);
std::unique_ptr<ByteSource> make_data_source(SecureConnection connection, const TcpChannelOptions& options);

/// What is written to it leaves `sink` in records. Takes bytes before they have left, as a socket does, but for the
/// last byte of each batch, which counts as written when the whole batch has left: so whoever has more to write tries
/// again. Bytes once offered must be offered again until they are taken.
std::unique_ptr<ByteSink> make_sealed_sink(std::unique_ptr<ByteSink> sink, const ConnectionKeys& keys);
/// Opens the records that arrive from `source`. Throws ProtocolError for bytes that are not authentic; none of a record
/// are handed out before all of it is.
std::unique_ptr<ByteSource> make_sealed_source(std::unique_ptr<ByteSource> source, const ConnectionKeys& keys);

}  // namespace maniple
