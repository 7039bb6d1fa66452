#include "tensor/public_call.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "base/format.h"

namespace maniple {
namespace {

thread_local const PublicCall* innermost = nullptr;

}  // namespace

PublicCall::PublicCall(const char* name, const SourceLocation& where) noexcept
    : name_(name), where_(where), outer_(std::exchange(innermost, this)) {
  if (where_.line() == 0 && outer_ != nullptr) where_ = outer_->where_;
}

PublicCall::~PublicCall() { innermost = outer_; }

// The flight recorder keeps the pointer, so a text lives as long as the process. There are as many as a program has lines with such calls.
SourceLocation public_place() {
  if (innermost == nullptr) return {};
  const PublicCall* outermost = innermost;
  while (outermost->outer_ != nullptr) outermost = outermost->outer_;
  const SourceLocation& where = innermost->where_;

  using Key = std::tuple<const void*, const void*, const void*, unsigned>;
  static std::mutex mutex;
  static auto& texts = *new std::map<Key, const std::string>();
  const std::lock_guard lock(mutex);
  const auto [found, added] =
      texts.try_emplace({innermost->name_, outermost->name_, where.file_name(), where.line()}, [&] {
        std::string text = format_text("in {}", innermost->name_), more;
        if (outermost != innermost) more = format_text("in {}", outermost->name_);
        if (where.line() != 0)
          more += format_text("{}{}:{}", more.empty() ? "" : " at ", where.file_name(), where.line());
        if (!more.empty()) text += format_text(" ({})", more);
        return text;
      }());
  return SourceLocation::current(found->second.c_str(), 0, "");
}

}  // namespace maniple
