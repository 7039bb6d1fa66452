#include "comm/store/store_service.h"

#include <gtest/gtest.h>

#include <map>

#include "comm/base/codec.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

class Service : public testing::Test {
 protected:
  void request(StoreService::Client client, StoreOp op, std::string body, std::uint32_t id) {
    service.handle(client, Frame{id, static_cast<std::uint8_t>(op), std::move(body)});
  }
  void set(StoreService::Client client, std::string_view key, std::string_view value) {
    ByteWriter writer;
    writer.put_string(key);
    writer.put_raw(value);
    request(client, StoreOp::set, writer.take(), 1000);
  }
  void erase(StoreService::Client client, std::string_view key) {
    ByteWriter writer;
    writer.put_string(key);
    request(client, StoreOp::erase, writer.take(), 1001);
  }
  void wait(StoreService::Client client, std::vector<std::string> keys, std::uint32_t id, StoreOp op = StoreOp::wait) {
    request(client, op, encode_keys(keys), id);
  }

  std::map<std::pair<StoreService::Client, std::uint32_t>, Frame> replies;
  ServiceLimits limits{.table = {}, .pending_per_client = 3};
  StoreService service{[this](StoreService::Client client, StoreService::Reply reply) {
                         MessageReader reader(kStoreReplies);
                         for (const Value& piece : reply) {
                           std::string_view bytes = *piece;
                           while (auto message = reader.next(bytes)) {
                             Frame frame = frame_of(std::move(*message));
                             replies[{client, frame.id}] = std::move(frame);
                           }
                         }
                       },
                       limits};
};

TEST_F(Service, AParkedRequestIsAnsweredWhenItsLastKeyComes) {
  wait(1, {"a", "b", "c"}, 7, StoreOp::multi_get);
  set(2, "b", "2");
  set(2, "c", "3");
  EXPECT_EQ(replies.count({1, 7}), 0u);
  set(2, "a", "1");
  ASSERT_EQ(replies.count({1, 7}), 1u);
  EXPECT_EQ(decode_values(replies[{1, 7}].body, 3), (std::vector<std::string>{"1", "2", "3"}));
  EXPECT_EQ(service.pending(), 0u);
}

TEST_F(Service, AKeyErasedMeanwhileIsWaitedForAgain) {
  wait(1, {"a", "b"}, 7, StoreOp::multi_get);
  set(2, "a", "1");
  erase(2, "a");
  set(2, "b", "2");
  EXPECT_EQ(replies.count({1, 7}), 0u);
  set(2, "a", "again");
  EXPECT_EQ(decode_values(replies.at({1, 7}).body, 2), (std::vector<std::string>{"again", "2"}));
}

TEST_F(Service, LargeValuesAreSharedAndSmallOnesCopied) {
  const std::string large(100'000, 'x');
  set(1, "large", large);
  set(1, "small", "s");
  wait(1, {"small", "large", "small"}, 5, StoreOp::multi_get);
  EXPECT_EQ(decode_values(replies.at({1, 5}).body, 3), (std::vector<std::string>{"s", large, "s"}));
}

TEST_F(Service, CancelAndForgetLeaveNothingBehind) {
  wait(1, {"k"}, 1);
  wait(1, {"k"}, 2);
  wait(2, {"k", "l"}, 1);
  EXPECT_EQ(service.pending(), 3u);
  request(1, StoreOp::cancel, "", 1);
  request(1, StoreOp::cancel, "", 99);
  request(3, StoreOp::cancel, "", 1);
  EXPECT_EQ(service.pending(), 2u);
  service.forget(2);
  service.forget(2);
  EXPECT_EQ(service.pending(), 1u);
  set(3, "k", "");
  EXPECT_EQ(replies.count({1, 1}), 0u);
  EXPECT_EQ(replies.count({1, 2}), 1u);
  EXPECT_EQ(replies.count({2, 1}), 0u);
}

TEST_F(Service, TooManyParkedRequestsAreRefusedToThatClientOnly) {
  for (std::uint32_t id = 1; id <= 3; ++id) wait(1, {"k"}, id);
  wait(1, {"k"}, 4);
  EXPECT_EQ(replies.at({1, 4}).code, static_cast<std::uint8_t>(StoreStatus::invalid));
  wait(2, {"k"}, 4);
  EXPECT_EQ(replies.count({2, 4}), 0u);
  EXPECT_EQ(service.pending(), 4u);
  EXPECT_THROW(wait(2, {"k"}, 4), ProtocolError);  // an id that is in use
  EXPECT_EQ(service.pending(), 4u);
}

TEST_F(Service, AnswersThatWouldBeTooLargeAreRefused) {
  const std::string value(kMaxValueBytes, 'v');
  set(1, "v", value);
  wait(1, std::vector<std::string>(5, "v"), 3, StoreOp::multi_get);
  EXPECT_EQ(replies.at({1, 3}).code, static_cast<std::uint8_t>(StoreStatus::invalid));
}

}  // namespace
}  // namespace maniple
