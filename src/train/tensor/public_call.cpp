#include "train/tensor/public_call.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "comm/base/fork_guard.h"
#include "comm/base/format.h"
#include "comm/base/mutex.h"

namespace maniple {
namespace {

thread_local const PublicCall* innermost = nullptr;

// Texts are never freed, because the flight recorder keeps pointers to them. Their number is bounded by the number of
// such call sites in the program.
struct Texts {
  Mutex mutex;
  std::map<std::tuple<const void*, const void*, const void*, unsigned>, const std::string> by_call
      MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Texts> texts;

}  // namespace

PublicCall::PublicCall(const char* name, const SourceLocation& where) noexcept
    : name_(name), where_(where), outer_(std::exchange(innermost, this)) {
  if (where_.line() == 0 && outer_ != nullptr) where_ = outer_->where_;
}

PublicCall::~PublicCall() { innermost = outer_; }

SourceLocation public_place() {
  if (innermost == nullptr) return {};
  const PublicCall* outermost = innermost;
  while (outermost->outer_ != nullptr) outermost = outermost->outer_;
  const SourceLocation& where = innermost->where_;

  Texts& all = *texts;
  const MutexLock lock(all.mutex);
  const auto [found, added] =
      all.by_call.try_emplace({innermost->name_, outermost->name_, where.file_name(), where.line()}, [&] {
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
