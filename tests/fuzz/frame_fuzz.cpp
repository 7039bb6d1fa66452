// What a peer sends, at random: the decoders of headers, and a lane that receives three messages from such a stream.
// Nothing may be written outside the posted memory; the only ways out are the typed errors.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "transport/frame.h"
#include "transport/recv_lane.h"
#include <maniple/comm/error.h>

namespace {

using namespace maniple;

class Bytes final : public ByteSource {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), left_(size) {}
  std::size_t read_some(std::span<const iovec> parts) override {
    if (left_ == 0) throw SystemError("the input ends", 0);
    std::size_t total = 0;
    for (const iovec& part : parts) {
      const std::size_t size = std::min(left_, part.iov_len);
      if (size > 0) std::memcpy(part.iov_base, at_, size);
      at_ += size;
      left_ -= size;
      total += size;
    }
    return total;
  }
  int fd() const noexcept override { return -1; }

 private:
  const std::uint8_t* at_;
  std::size_t left_;
};

void decode(const std::uint8_t* data, std::size_t size) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  try {
    if (size >= kPieceHeaderBytes)
      decode_piece_header(std::span<const std::byte, kPieceHeaderBytes>(bytes, kPieceHeaderBytes));
  } catch (const ProtocolError&) {
  }
  try {
    if (size >= kFrameHeaderBytes)
      decode_frame_header(std::span<const std::byte, kFrameHeaderBytes>(bytes, kFrameHeaderBytes));
  } catch (const ProtocolError&) {
  }
}

void receive(const std::uint8_t* data, std::size_t size) {
  const Signature signature;
  const std::size_t sizes[3] = {0, 10, kPieceBytes + 1};
  RecvLane lane({3, 5}, [&](int) { return std::make_unique<Bytes>(data, size); });
  static std::vector<std::byte> memory[3];
  std::vector<Transfer> transfers(3);
  for (std::size_t i = 0; i < 3; ++i) {
    memory[i].resize(sizes[i]);
    transfers[i].signature = &signature;
    transfers[i].to = memory[i].data();
    transfers[i].size = sizes[i];
    lane.post(transfers[i]);
  }
  try {
    while (lane.pending() && lane.advance()) {
    }
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  decode(data, size);
  // Random bytes hardly ever pass the header's check, so a second run gives the lane a right header to begin with.
  receive(data, size);
  std::vector<std::uint8_t> headed(2 * kFrameHeaderBytes);
  const auto as_bytes = std::as_writable_bytes(std::span(headed));
  encode(FrameHeader{.signature = {}, .length = 0}, as_bytes.first<kFrameHeaderBytes>());
  encode(FrameHeader{.signature = {},
                     .length = 10,
                     .number = 1,
                     .streams = 2,
                     .checked = (size & 1) != 0,
                     .pieced = (size & 2) != 0},
         as_bytes.last<kFrameHeaderBytes>());
  headed.insert(headed.end(), data, data + size);
  receive(headed.data(), headed.size());
  return 0;
}
