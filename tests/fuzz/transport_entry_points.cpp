// Nothing may be written outside the posted memory, which the address sanitizer sees.
#include <algorithm>
#include <array>
#include <cstring>

#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "transport/frame.h"
#include "transport/message_stream.h"
#include "transport/recv_lane.h"

namespace maniple::fuzz {
namespace {

/// The input as a channel that gives at most `step` bytes at a time and then breaks.
class Input final : public ByteSource {
 public:
  Input(std::string_view bytes, std::size_t step) : bytes_(bytes), step_(step) {}
  std::size_t read_some(std::span<const iovec> parts) override {
    if (bytes_.empty()) throw SystemError("the input ends", 0);
    std::size_t total = 0;
    for (const iovec& part : parts) {
      const std::size_t size = std::min({bytes_.size(), part.iov_len, step_ - total});
      if (size > 0) std::memcpy(part.iov_base, bytes_.data(), size);
      bytes_.remove_prefix(size);
      total += size;
    }
    return total;
  }
  int fd() const noexcept override { return -1; }

 private:
  std::string_view bytes_;
  std::size_t step_;
};

template <std::size_t kSize>
std::array<std::byte, kSize> first_bytes(std::string_view bytes) {
  std::array<std::byte, kSize> result;
  std::memcpy(result.data(), bytes.data(), kSize);
  return result;
}

template <class Header, std::size_t kSize>
std::string header_text(const Header& header) {
  std::string text(kSize, '\0');
  encode(header, std::as_writable_bytes(std::span<char, kSize>(text.data(), kSize)));
  return text;
}
std::string text_of(const FrameHeader& header) { return header_text<FrameHeader, kFrameHeaderBytes>(header); }
std::string text_of(const PieceHeader& header) { return header_text<PieceHeader, kPieceHeaderBytes>(header); }

void receive_frames(std::string_view bytes) {
  const Signature signature;
  const std::size_t sizes[3] = {0, 10, kPieceBytes + 1};
  static std::vector<std::byte> memory[3];
  std::vector<Transfer> transfers(3);
  RecvLane lane({3, 5}, [&](int) { return std::make_unique<Input>(bytes, bytes.size()); });
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

/// What came, message by message, until the input breaks or is refused.
std::vector<std::vector<std::byte>> receive_messages(std::string_view bytes, std::size_t step) {
  constexpr std::uint64_t kMost = 1 << 12;  // the engine has a limit too, before it sets memory aside
  std::vector<std::vector<std::byte>> messages;
  IncomingStream stream(std::make_unique<Input>(bytes, step));
  try {
    for (bool moved = false;;) {
      const MessageHeader* header = stream.peek(moved);
      if (header == nullptr || header->length > kMost) break;
      std::vector<std::byte> payload(header->length);
      std::size_t done = 0;
      while (!stream.advance(payload.data(), done, moved)) {
      }
      messages.push_back(std::move(payload));
      stream.next();
    }
  } catch (const Error&) {
  }
  return messages;
}

std::string text_of(const MessageHeader& header) {
  const MessageHeaderBytes bytes = encode(header);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Random bytes hardly ever pass a header's check, so each input is also read behind right headers.
std::string behind_frame_headers(std::string_view bytes) {
  const FrameHeader second{.signature = {},
                           .length = 10,
                           .number = 1,
                           .streams = 2,
                           .checked = (bytes.size() & 1) != 0,
                           .pieced = (bytes.size() & 2) != 0};
  return text_of(FrameHeader{.signature = {}, .length = 0}) + text_of(second) + std::string(bytes);
}

}  // namespace

void frame(std::string_view bytes) {
  if (bytes.size() >= kPieceHeaderBytes) {
    tolerate([&] {
      const PieceHeader header = decode_piece_header(first_bytes<kPieceHeaderBytes>(bytes));
      require(text_of(header) == bytes.substr(0, kPieceHeaderBytes));
    });
  }
  if (bytes.size() >= kFrameHeaderBytes) {
    tolerate([&] {
      const FrameHeader header = decode_frame_header(first_bytes<kFrameHeaderBytes>(bytes));
      require(text_of(header) == bytes.substr(0, kFrameHeaderBytes));
    });
  }
  receive_frames(bytes);
  receive_frames(behind_frame_headers(bytes));
}

void message(std::string_view bytes) {
  if (bytes.size() >= kMessageHeaderBytes) {
    tolerate([&] {
      const auto header = first_bytes<kMessageHeaderBytes>(bytes);
      require(encode(decode_message_header(header)) == header);
    });
  }
  const MessageHeader header{DType::float32, (bytes.size() & 1) != 0, 7, bytes.size() / 2};
  for (const std::string& input : {std::string(bytes), text_of(header) + std::string(bytes)}) {
    require(receive_messages(input, input.size()) == receive_messages(input, 1));
  }
}

std::vector<std::string> frame_seeds() {
  const std::string payload = "ten bytes.";
  const FrameHeader empty{.signature = {}, .length = 0};
  const FrameHeader whole{.signature = {}, .length = payload.size(), .number = 1};
  const FrameHeader pieced{.signature = {}, .length = payload.size(), .number = 1, .streams = 2, .pieced = true};
  const std::string piece = text_of(PieceHeader{.number = 1, .index = 0}) + payload;
  return {"", piece, text_of(empty), text_of(empty) + text_of(whole) + payload,
          text_of(empty) + text_of(pieced) + piece};
}

std::vector<std::string> message_seeds() {
  const std::string payload = "ten bytes.";
  const std::string plain = text_of(MessageHeader{DType::uint8, false, 1, payload.size()}) + payload;
  const std::string checked =
      text_of(MessageHeader{DType::uint8, true, 1, payload.size()}) + payload + std::string(4, '\0');
  return {"", text_of(MessageHeader{}), plain, checked, plain + plain + text_of(MessageHeader{})};
}

}  // namespace maniple::fuzz
