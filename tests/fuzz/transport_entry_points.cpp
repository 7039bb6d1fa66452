// Nothing may be written outside the posted memory, which the address sanitizer sees.
#include <algorithm>
#include <array>
#include <cstring>

#include "comm/transport/frame.h"
#include "comm/transport/frame_receiver.h"
#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"

namespace maniple::fuzz {
namespace {

/// The input as a channel that gives at most `step` bytes at a time and then breaks: a ring, or a socket, which is read
/// ahead.
class Input final : public ByteSource {
 public:
  Input(std::string_view bytes, std::size_t step, bool network) : bytes_(bytes), step_(step), network_(network) {}
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
  int fd() const noexcept override { return network_ ? 0 : -1; }

 private:
  std::string_view bytes_;
  std::size_t step_;
  bool network_;
};

template <std::size_t kSize>
std::array<std::byte, kSize> first_bytes(std::string_view bytes) {
  std::array<std::byte, kSize> result;
  std::memcpy(result.data(), bytes.data(), kSize);
  return result;
}

std::string text_of(const FrameHeader& header) {
  std::string text(header_bytes(header.kind), '\0');
  encode(header, reinterpret_cast<std::byte*>(text.data()));
  return text;
}
std::string text_of(const PieceHeader& header) {
  std::string text(kPieceHeaderBytes, '\0');
  encode(header, std::as_writable_bytes(std::span<char, kPieceHeaderBytes>(text.data(), kPieceHeaderBytes)));
  return text;
}

void receive_frames(std::string_view bytes, bool network) {
  const Signature signature;
  const std::size_t sizes[3] = {0, 10, kPieceBytes + 1};
  static std::vector<std::byte> memory[3];
  std::vector<Transfer> transfers(3);
  FrameReceiver receiver({3, 5}, [&](int) { return std::make_unique<Input>(bytes, bytes.size(), network); });
  for (std::size_t i = 0; i < 3; ++i) {
    memory[i].resize(sizes[i]);
    transfers[i].signature = &signature;
    transfers[i].to = memory[i].data();
    transfers[i].size = sizes[i];
    receiver.post(transfers[i]);
  }
  try {
    while (receiver.pending() && receiver.advance()) {
    }
  } catch (const Error&) {
  }
}

/// The payloads of the messages in the input, until it ends or is refused.
std::vector<std::vector<std::byte>> receive_messages(std::string_view bytes, std::size_t step, bool network) {
  constexpr std::uint64_t kMax = 1 << 12;  // MessageEngine has a limit too, before it allocates memory
  std::vector<std::vector<std::byte>> messages;
  FrameReceiver receiver({3, 5}, std::make_unique<Input>(bytes, step, network));
  try {
    for (;;) {
      const FrameHeader* header = receiver.peek();
      if (header == nullptr) continue;  // it has read something, or thrown
      if (header->length > kMax) break;
      std::vector<std::byte> payload(header->length);
      Transfer transfer;
      transfer.dtype = header->dtype;
      transfer.tag = header->tag;
      transfer.to = payload.data();
      transfer.size = payload.size();
      receiver.accept(transfer);
      while (!transfer.done) receiver.advance();
      messages.push_back(std::move(payload));
    }
  } catch (const Error&) {
  }
  return messages;
}

FrameHeader message_header(std::size_t bytes, bool checked = false) {
  return {.kind = FrameKind::message,
          .signature = {},
          .dtype = DType::uint8,
          .tag = 1,
          .length = bytes,
          .checked = checked};
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
  const auto* const first = reinterpret_cast<const std::byte*>(bytes.data());
  if (bytes.size() >= kFrameHeaderBytes && bytes.size() >= header_bytes(first)) {
    tolerate([&] { require(text_of(decode_frame_header(first)) == bytes.substr(0, header_bytes(first))); });
  }
  for (const bool network : {false, true}) {
    receive_frames(bytes, network);
    receive_frames(behind_frame_headers(bytes), network);
  }
}

void message(std::string_view bytes) {
  FrameHeader header = message_header(bytes.size() / 2, (bytes.size() & 1) != 0);
  header.pieced = (bytes.size() & 2) != 0 && header.length > 0;
  for (const std::string& input : {std::string(bytes), text_of(header) + std::string(bytes)}) {
    const auto whole = receive_messages(input, input.size(), true);
    require(whole == receive_messages(input, 1, true));
    require(whole == receive_messages(input, input.size(), false));
    require(whole == receive_messages(input, 1, false));
  }
}

std::vector<std::string> frame_seeds() {
  const std::string payload = "ten bytes.";
  const FrameHeader empty{.signature = {}, .length = 0};
  const FrameHeader whole{.signature = {}, .length = payload.size(), .number = 1};
  const FrameHeader pieced{.signature = {}, .length = payload.size(), .number = 1, .streams = 2, .pieced = true};
  const std::string piece = text_of(PieceHeader{.number = 1, .index = 0}) + payload;
  FrameHeader notice;
  notice.kind = FrameKind::notice;
  notice.number = 1;
  return {"",
          piece,
          text_of(empty),
          text_of(empty) + text_of(whole) + payload,
          text_of(empty) + text_of(pieced) + piece,
          text_of(empty) + text_of(notice)};
}

std::vector<std::string> message_seeds() {
  const std::string payload = "ten bytes.";
  const std::string plain = text_of(message_header(payload.size())) + payload;
  const std::string checked = text_of(message_header(payload.size(), true)) + payload;
  return {"", text_of(message_header(0)), plain, checked, plain + plain + text_of(message_header(0))};
}

}  // namespace maniple::fuzz
