#include "base/check.h"
#include <maniple/comm/store.h>

namespace maniple {
namespace {

class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix) + "/"), store_(std::move(store)) {}

  void set(std::string_view key, std::string_view value) override { store_->set(full(key), value); }
  std::string get(std::string_view key, Deadline deadline) override { return store_->get(full(key), deadline); }
  std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) override {
    return store_->multi_get(full(keys), deadline);
  }
  void wait(std::span<const std::string> keys, Deadline deadline) override { store_->wait(full(keys), deadline); }
  std::vector<bool> check(std::span<const std::string> keys) override { return store_->check(full(keys)); }
  std::int64_t add(std::string_view key, std::int64_t delta) override { return store_->add(full(key), delta); }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override {
    return store_->compare_set(full(key), expected, desired);
  }
  bool erase(std::string_view key) override { return store_->erase(full(key)); }
  std::int64_t num_keys() override { return store_->num_keys(); }
  std::string describe() const override { return store_->describe() + " below \"" + prefix_ + "\""; }

 private:
  std::string full(std::string_view key) const {
    MANIPLE_REQUIRE(!key.empty(), "an empty store key below \"{}\"", prefix_);
    return prefix_ + std::string(key);
  }
  std::vector<std::string> full(std::span<const std::string> keys) const {
    std::vector<std::string> result;
    result.reserve(keys.size());
    for (const std::string& key : keys) result.push_back(full(key));
    return result;
  }

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store) {
  MANIPLE_REQUIRE(store != nullptr, "make_prefix_store(\"{}\"): no store", prefix);
  return std::make_shared<PrefixStore>(std::move(prefix), std::move(store));
}

}  // namespace maniple
