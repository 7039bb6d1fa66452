#include "comm/capi/callback_store.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/error_codec.h"
#include "comm/base/interrupt.h"
#include "comm/capi/handles.h"

namespace maniple {
namespace {

maniple_bytes bytes_of(std::string_view text) { return {text.data(), text.size()}; }

void assign(void* to, const char* data, std::size_t size) { static_cast<std::string*>(to)->assign(data, size); }

class CallbackStore final : public Store {
 public:
  explicit CallbackStore(const maniple_store& store)
      : store_(store), description_(store.description == nullptr ? "a store" : store.description) {}
  ~CallbackStore() override {
    if (store_.release != nullptr) store_.release(store_.context);
  }

  void set(std::string_view key, std::string_view value) override {
    check(store_.set(store_.context, bytes_of(key), bytes_of(value)));
  }

  std::string get(std::string_view key, Deadline deadline) override {
    const std::string name(key);
    wait({&name, 1}, deadline);
    return value_of(name);
  }

  std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) override {
    wait(keys, deadline);
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(value_of(key));
    return values;
  }

  void wait(std::span<const std::string> keys, Deadline deadline) override {
    constexpr std::chrono::microseconds kFirst{100};
    constexpr std::chrono::microseconds kLongest{5000};
    std::vector<maniple_bytes> asked;
    for (const std::string& key : keys) asked.push_back(bytes_of(key));
    for (auto pause = kFirst; !has_all(asked); pause = std::min(pause * 3 / 2, kLongest)) {
      if (deadline.expired()) throw_missing(keys);
      Interrupt::check();
      // sleep: another process sets the key, and the caller's store cannot wait for it
      std::this_thread::sleep_for(std::min<Deadline::Duration>(pause, deadline.remaining()));
    }
  }

  std::vector<bool> check(std::span<const std::string> keys) override {
    std::vector<bool> there;
    for (const std::string& key : keys) there.push_back(has_all({bytes_of(key)}));
    return there;
  }

  std::int64_t add(std::string_view key, std::int64_t delta) override {
    std::int64_t sum = 0;
    check(store_.add(store_.context, bytes_of(key), delta, &sum));
    return sum;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override {
    std::string value;
    check(store_.compare_set(store_.context, bytes_of(key), bytes_of(expected), bytes_of(desired), assign, &value));
    return value;
  }

  bool erase(std::string_view key) override {
    int existed = 0;
    check(store_.erase(store_.context, bytes_of(key), &existed));
    return existed != 0;
  }

  std::int64_t num_keys() override { throw Unsupported(description_ + ": the number of its keys is not known"); }

  std::string describe() const override { return description_; }

 private:
  static void check(maniple_error* error) {
    if (error == nullptr) return;
    ErrorInfo info;
    info.kind = static_cast<ErrorKind>(error->kind);
    info.reason = error->text;
    maniple_error_free(error);
    std::rethrow_exception(make_error(std::move(info)));
  }

  bool has_all(const std::vector<maniple_bytes>& keys) {
    int all = 0;
    check(store_.has_all(store_.context, keys.data(), keys.size(), &all));
    return all != 0;
  }

  std::string value_of(const std::string& key) {
    std::string value;
    check(store_.get(store_.context, bytes_of(key), assign, &value));
    return value;
  }

  [[noreturn]] void throw_missing(std::span<const std::string> keys) {
    std::vector<std::string> missing;
    const std::vector<bool> there = check(keys);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!there[i]) missing.push_back(keys[i]);
    }
    throw Timeout(fmt::format("{}: timed out while waiting for the keys {}", description_, fmt::join(missing, ", ")));
  }

  maniple_store store_;
  std::string description_;
};

}  // namespace

std::shared_ptr<Store> make_callback_store(const maniple_store& store) {
  return std::make_shared<CallbackStore>(store);
}

}  // namespace maniple
