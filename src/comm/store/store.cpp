// The stores that do not need a server: an in-memory store, and a view of another store below a prefix.
#include <maniple/comm/store.h>

#include <mutex>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "comm/store/key_table.h"

namespace maniple {
namespace {

class MemoryStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value) override {
    require_value(value);
    auto shared = std::make_shared<const std::string>(value);
    const MutexLock lock(mutex());
    table_.set(key, std::move(shared));
    changed_.notify_all();
  }

  std::string get(std::string_view key, Deadline deadline) override {
    const std::string owned(key);
    return multi_get(std::span(&owned, 1), deadline).front();
  }

  std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) override {
    MutexLock lock(mutex());
    await(lock, keys, deadline);
    std::vector<std::string> values;
    values.reserve(keys.size());
    for (const std::string& key : keys) values.push_back(*table_.find(key));
    return values;
  }

  void wait(std::span<const std::string> keys, Deadline deadline) override {
    MutexLock lock(mutex());
    await(lock, keys, deadline);
  }

  std::vector<bool> check(std::span<const std::string> keys) override {
    require_keys(keys);
    const MutexLock lock(mutex());
    return present(keys);
  }

  std::int64_t add(std::string_view key, std::int64_t delta) override {
    const MutexLock lock(mutex());
    const std::int64_t sum = table_.add(key, delta);
    changed_.notify_all();
    return sum;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override {
    const MutexLock lock(mutex());
    const auto swap = table_.compare_set(key, expected, desired);
    if (swap.changed) changed_.notify_all();
    return std::string(swap.now);
  }

  bool erase(std::string_view key) override {
    require_key(key);
    const MutexLock lock(mutex());
    return table_.erase(key);
  }

  std::int64_t num_keys() override {
    const MutexLock lock(mutex());
    return static_cast<std::int64_t>(table_.size());
  }

  std::string describe() const override { return "memory store"; }

 private:
  Mutex& mutex() MANIPLE_RETURN_CAPABILITY(mutex_) {
    require_owned(guard_, describe());
    return mutex_;
  }

  std::vector<bool> present(std::span<const std::string> keys) const MANIPLE_REQUIRES(mutex_) {
    std::vector<bool> result;
    result.reserve(keys.size());
    for (const std::string& key : keys) result.push_back(table_.find(key) != nullptr);
    return result;
  }

  void await(MutexLock& lock, std::span<const std::string> keys, Deadline deadline) MANIPLE_REQUIRES(mutex_) {
    require_keys(keys);
    const auto start = Deadline::Clock::now();
    const auto all_there = [&]() MANIPLE_REQUIRES(mutex_) {
      for (const std::string& key : keys) {
        if (table_.find(key) == nullptr) return false;
      }
      return true;
    };
    if (deadline.is_never()) return changed_.wait(lock, all_there);
    if (changed_.wait_until(lock, deadline.when(), all_there)) return;
    const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
    throw Timeout(fmt::format("{}: {}", describe(), missing_keys_text(keys, present(keys), waited.count())), {},
                  waited.count());
  }

  ForkGuard guard_;
  Mutex mutex_;
  CondVar changed_;
  KeyTable table_ MANIPLE_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> make_memory_store() { return std::make_shared<MemoryStore>(); }

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
