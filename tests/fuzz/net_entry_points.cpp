#include "fuzz/entry_points.h"

#include <algorithm>

#include "comm/base/codec.h"
#include "comm/base/error_codec.h"
#include "comm/net/handshake_wire.h"
#include "comm/net/secure_connection.h"
#include "comm/store/file_store.h"
#include "comm/store/store_service.h"
#include "fuzz/tolerate.h"
#include <maniple/comm/error.h>

namespace maniple::fuzz {
namespace {

void read_hello(std::string_view bytes) {
  const WireHeader header = decode_header(bytes.substr(0, kHeaderBytes));
  if (header.version != kProtocolVersion) return;
  const std::string_view body = bytes.substr(kHeaderBytes).substr(0, header.length);
  const WireHello hello = decode_hello(body);
  // What was understood must say the same when said again.
  require(encode_hello(hello).substr(kHeaderBytes) == body);
  Identity here;
  here.world_size = 4;
  const Address address = Address::parse("127.0.0.1:1");
  judge(here, address, hello, address);
}

std::vector<Frame> frames_of(std::string_view bytes, const MessageFormat& format, std::size_t step) {
  MessageReader reader(format);
  std::vector<Frame> frames;
  try {
    while (!bytes.empty()) {
      std::string_view part = bytes.substr(0, step);
      bytes.remove_prefix(part.size());
      while (auto message = reader.next(part)) frames.push_back(frame_of(std::move(*message)));
    }
  } catch (const ProtocolError&) {
  }
  return frames;
}

constexpr std::string_view kSealed[] = {"first", "second, which is longer", "third"};

std::string opened(std::string_view bytes, std::size_t step) {
  RecordOpener opener(Cipher::chacha20_poly1305, TrafficSecret{});
  std::string plain;
  std::string copy(bytes);  // it is overwritten
  try {
    for (std::size_t at = 0; at < copy.size(); at += step) {
      std::span<char> part(copy.data() + at, std::min(step, copy.size() - at));
      while (const auto record = opener.next(part)) plain += *record;
      require(part.empty());
    }
  } catch (const ProtocolError&) {
    std::span<char> more(copy);
    try {
      opener.next(more);
      require(false);
    } catch (const ProtocolError&) {
    }
  }
  return plain;
}

}  // namespace

void records(std::string_view bytes) {
  std::string all;
  for (const std::string_view part : kSealed) all += part;
  const std::string plain = opened(bytes, std::max<std::size_t>(bytes.size(), 1));
  require(all.starts_with(plain));
  require(opened(bytes, 1) == plain);
}

std::vector<std::string> records_seeds() {
  RecordSealer sealer(Cipher::chacha20_poly1305, TrafficSecret{});
  std::string sealed;
  for (const std::string_view part : kSealed) sealer.seal(part, sealed);
  return {sealed, sealed.substr(kRecordOverhead + kSealed[0].size()), ""};
}

void error(std::string_view bytes) {
  tolerate([&] {
    const ErrorInfo info = decode_error(bytes);
    require(encode_error(info) == bytes);
    require(info_of(make_error(info)).kind == info.kind);
  });
  tolerate([&] { require(encode_report(decode_report(bytes)).size() <= kMaxReportBytes); });
}

std::vector<std::string> error_seeds() {
  const ErrorInfo info{.kind = ErrorKind::timeout,
                       .operation = "recv",
                       .sequence = 7,
                       .arguments = "from rank 1 tag 7",
                       .group = "world/2",
                       .rank = 3,
                       .size = 8,
                       .ranks = {5, 6},
                       .origin = 3,
                       .waited_s = 30,
                       .bytes_moved = 3,
                       .bytes_expected = 8,
                       .reason = "timed out"};
  const ErrorInfo lost{.kind = ErrorKind::peer_lost, .ranks = {2}, .loss = LossKind::left, .reason = "left"};
  const ErrorInfo mismatch{.kind = ErrorKind::mismatch,
                           .calls = {{.rank = 0, .call = "barrier #3", .place = "a.cpp:1"}, {.rank = 1}},
                           .reason = "ranks called different things"};
  return {encode_error(info), encode_error(lost), encode_error(mismatch), encode_error(ErrorInfo{}),
          encode_report({.rank = 3, .error = info})};
}

void handshake(std::string_view bytes) {
  for (std::size_t i = 0; i <= std::min<std::size_t>(bytes.size(), 16); ++i) may_begin_header(bytes.substr(0, i));
  describe_foreign_client(bytes);
  tolerate([&] { read_hello(bytes); });
  tolerate([&] { decode_hello(bytes); });
  tolerate([&] { decode_challenge(bytes); });
  tolerate([&] { decode_verdict_header(bytes.substr(0, kVerdictHeaderBytes)); });
}

void store(std::string_view bytes) {
  const auto frames = frames_of(bytes, kStoreRequests, bytes.size());
  const auto again = frames_of(bytes, kStoreRequests, 1);
  require(frames.size() == again.size());
  for (std::size_t i = 0; i < frames.size(); ++i)
    require(frames[i].id == again[i].id && frames[i].body == again[i].body);

  StoreService service(
      [](StoreService::Client, const StoreService::Reply& reply) {
        std::string whole;
        for (const Value& piece : reply) whole += *piece;
        require(frames_of(whole, kStoreReplies, whole.size()).size() == 1);
      },
      {.table = {.keys = 100, .bytes = 1 << 16}, .pending_per_client = 8});
  StoreService::Client client = 1;
  for (const Frame& frame : frames) {
    tolerate([&] { service.handle(client, frame); });
    client = 3 - client;
  }
  service.forget(1);
  service.forget(2);
  require(service.pending() == 0);

  for (const Frame& frame : frames_of(bytes, kStoreReplies, bytes.size())) {
    tolerate([&] { decode_values(frame.body, 3); });
    tolerate([&] { decode_flags(frame.body, 3); });
  }
  std::string_view log = bytes;
  tolerate([&] {
    while (decode_record(log)) {
    }
  });
}

std::vector<std::string> handshake_seeds() {
  const WireHello hello{.role = Role::data,
                        .generation = 1,
                        .world_size = 4,
                        .rank = 2,
                        .nonce = {},
                        .job = "default",
                        .topic = "world/0:1"};
  const std::string bytes = encode_hello(hello);
  const std::string challenge = encode_challenge_prefix(ChallengeStatus::ok, Nonce{}) + std::string(kMacBytes, 'm');
  return {bytes,
          bytes.substr(kHeaderBytes),
          challenge,
          challenge.substr(kHeaderBytes),
          encode_verdict("refused"),
          encode_verdict(""),
          "GET / HTTP/1.1\r\n",
          ""};
}

std::vector<std::string> store_seeds() {
  std::uint32_t id = 0;
  const auto frame = [&](StoreOp op, std::string_view body) {
    return encode_frame_header(++id, static_cast<std::uint8_t>(op), body.size()) + std::string(body);
  };
  ByteWriter key;
  key.put_string("key");
  ByteWriter add;
  add.put_string("count");
  add.put(std::int64_t{5});
  ByteWriter compare;
  compare.put_string("key");
  compare.put_string("expected");
  const std::vector<std::string> keys = {"key", "other", "count"};
  std::vector<std::string> seeds = {
      frame(StoreOp::set, key.bytes() + "value"),
      frame(StoreOp::add, add.bytes()),
      frame(StoreOp::compare_set, compare.bytes() + "desired"),
      frame(StoreOp::multi_get, encode_keys(keys)),
      frame(StoreOp::wait, encode_keys(keys)),
      frame(StoreOp::check, encode_keys(keys)),
      frame(StoreOp::erase, key.bytes()),
      frame(StoreOp::num_keys, ""),
      frame(StoreOp::cancel, ""),
      encode_record({RecordKind::set, "key", "value"}) + encode_record({RecordKind::erase, "key", ""}),
  };
  std::string all;
  for (const std::string& seed : seeds) all += seed;
  seeds.push_back(all + all);
  return seeds;
}

}  // namespace maniple::fuzz
