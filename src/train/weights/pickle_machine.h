// The stack machine that runs a pickle, with the instructions of protocols 2 to 5. It only makes plain values;
// pickle.cpp has function calls and storage descriptions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "comm/base/check.h"
#include "train/weights/pickle.h"

namespace maniple {

enum class PickleKind : std::uint8_t {
  none,
  boolean,
  integer,
  large_integer,
  real,
  text,
  bytes,
  tuple,
  list,
  set,
  dict,
  function,
  storage_type,
  dtype,
  storage,
  tensor,
  other,
};

/// The kind in messages: "a whole number".
const char* described(PickleKind kind);

using PickleRef = std::uint32_t;  // index of a value

struct PickleValue {
  PickleKind kind = PickleKind::none;
  std::int64_t number = 0;       // an integer's value; index of a function, type, storage or tensor
  std::string_view text;         // points into the pickle
  std::vector<PickleRef> items;  // for dictionaries: key, value, key, value, ...
};

inline constexpr std::size_t kMaxPickledValues = 4'000'000;  // 56 bytes each; a tensor takes about 15 values

class PickleMachine {
 public:
  explicit PickleMachine(std::string_view pickle) : pickle_(pickle) {}

  /// Runs the pickle and returns the value that it makes.
  PickleRef run();
  const PickleValue& operator[](PickleRef ref) const { return values_.at(ref); }
  const PickledTensor& tensor(const PickleValue& value) const { return tensors_.at(value.number); }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw ProtocolError(format_text("the pickle is damaged at byte {}: {}", at_, what));
  }

  std::string_view take(std::uint64_t count) {
    if (count > pickle_.size() - at_) fail("it ends inside an instruction");
    const std::string_view bytes = pickle_.substr(at_, count);
    at_ += bytes.size();
    return bytes;
  }
  std::uint64_t take_number(std::size_t width) {
    std::uint64_t value = 0;
    const std::string_view bytes = take(width);
    for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    return value;
  }
  std::string_view take_line() {
    const std::size_t end = pickle_.find('\n', at_);
    if (end == std::string_view::npos) fail("a name does not end");
    const std::string_view line = pickle_.substr(at_, end - at_);
    at_ = end + 1;
    return line;
  }

  void push(PickleRef ref) { stack_.push_back(ref); }
  PickleValue& make(PickleKind kind, std::int64_t number = 0, std::string_view text = {}) {
    if (values_.size() >= kMaxPickledValues) fail(format_text("it makes more than {} values", kMaxPickledValues));
    values_.push_back({kind, number, text, {}});
    push(static_cast<PickleRef>(values_.size() - 1));
    return values_.back();
  }
  PickleRef top() const {
    if (stack_.size() <= floor()) fail("its stack is empty");
    return stack_.back();
  }
  PickleRef pop() {
    const PickleRef ref = top();
    stack_.pop_back();
    return ref;
  }
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  std::vector<PickleRef> pop_to_mark() {
    if (marks_.empty()) fail("a mark is missing");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<PickleRef> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void make_tuple(std::size_t count) {
    std::vector<PickleRef> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    make(PickleKind::tuple).items = std::move(items);
  }
  void make_of(PickleKind kind, std::vector<PickleRef> items) { make(kind).items = std::move(items); }
  void make_dict(std::vector<PickleRef> items) {
    if (items.size() % 2 != 0) fail("a key has no value");
    make_of(PickleKind::dict, std::move(items));
  }
  void add_to(PickleKind kind, const std::vector<PickleRef>& items) {
    PickleValue& target = values_[top()];
    if (target.kind != kind)
      fail(format_text("it adds to {} what belongs to {}", described(target.kind), described(kind)));
    if (kind == PickleKind::dict && items.size() % 2 != 0) fail("a key has no value");
    target.items.insert(target.items.end(), items.begin(), items.end());
  }
  void add_to_below(PickleKind kind, std::size_t count) {
    std::vector<PickleRef> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    add_to(kind, items);
  }
  void remember(std::uint64_t place) {
    if (memo_.size() >= kMaxPickledValues) fail("it remembers too many values");
    memo_[place] = top();
  }
  void recall(std::uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) fail("it recalls what it has not made");
    push(found->second);
  }
  void make_long(std::uint64_t width) {
    const std::string_view bytes = take(width);
    if (width > 8) {
      make(PickleKind::large_integer);
      return;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    if (width > 0 && width < 8 && (static_cast<unsigned char>(bytes.back()) & 0x80) != 0)
      value |= ~std::uint64_t{0} << (8 * width);
    make(PickleKind::integer, static_cast<std::int64_t>(value));
  }

  void name_global(std::string_view module, std::string_view name);
  void call();
  void make_storage();
  void make_tensor(const std::vector<PickleRef>& arguments, bool typed);
  std::vector<std::int64_t> extents(PickleRef ref, std::string_view what) const;
  bool step();  // runs one instruction; false at the end

  std::string_view pickle_;
  std::size_t at_ = 0;
  std::vector<PickleValue> values_;
  std::vector<PickleRef> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleRef> memo_;
  std::vector<PickledStorage> storages_;
  std::vector<std::string_view> storage_dtypes_;
  std::vector<PickledTensor> tensors_;
  std::size_t paired_ = 0;  // entries of dictionaries that were made from pairs
};

}  // namespace maniple
