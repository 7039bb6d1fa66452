// Operations on objects: lengths first, then bytes.

#include <cstring>

#include "comm/base/check.h"
#include "comm/group/group_impl.h"
#include "comm/group/validate.h"

namespace maniple {
namespace {

Buffer bytes_of(std::string& text) { return {text.data(), text.size(), DType::uint8}; }
ConstBuffer bytes_of(std::string_view text) { return {text.data(), text.size(), DType::uint8}; }

std::vector<std::string> cut(const std::string& all, std::span<const std::size_t> lengths) {
  std::vector<std::string> objects;
  std::size_t at = 0;
  for (const std::size_t length : lengths) {
    objects.emplace_back(all, at, length);
    at += length;
  }
  return objects;
}

// Several operations that other calls must not interleave with.
class Objects {
 public:
  Objects(detail::GroupImpl& group, const CallOptions& call, OperationContext& context)
      : group_(group), call_(call), context_(context) {}

  std::vector<std::size_t> lengths(std::size_t mine) {
    std::vector<std::int64_t> all(group_.size());
    const std::int64_t length = static_cast<std::int64_t>(mine);
    execute(all_gather_operation(shape(), buffer_of(std::span(&length, 1)), buffer_of(all), {}, call_));
    return {all.begin(), all.end()};
  }
  void broadcast(Buffer buffer, int root) { execute(broadcast_operation(shape(), buffer, root, call_)); }
  std::string all_gather(std::string_view mine, std::span<const std::size_t> lengths) {
    std::string all(total(lengths), '\0');
    execute(all_gather_operation(shape(), bytes_of(mine), bytes_of(all), lengths, call_));
    return all;
  }
  std::string gather(std::string_view mine, int root, std::span<const std::size_t> lengths) {
    std::string all(group_.rank() == root ? total(lengths) : 0, '\0');
    execute(gather_operation(shape(), bytes_of(mine), bytes_of(all), root, lengths, call_));
    return all;
  }
  std::string scatter(std::string_view all, int root, std::span<const std::size_t> lengths) {
    std::string mine(lengths[group_.rank()], '\0');
    execute(scatter_operation(shape(), bytes_of(all), bytes_of(mine), root, lengths, call_));
    return mine;
  }

 private:
  GroupShape shape() const { return {group_.rank(), group_.size()}; }
  void execute(Operation operation) { group_.execute(operation, context_); }
  static std::size_t total(std::span<const std::size_t> lengths) {
    std::size_t sum = 0;
    for (const std::size_t length : lengths) sum += length;
    return sum;
  }
  detail::GroupImpl& group_;
  const CallOptions& call_;
  OperationContext& context_;
};

void require_root(int root, int size) {
  MANIPLE_REQUIRE(root >= 0 && root < size, "root {} in a group of {} ranks", root, size);
}

}  // namespace

std::string ProcessGroup::broadcast_object(std::string_view object, int root, const CallOptions& options,
                                           const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("broadcast_object")) return {};
  require_root(root, size());
  std::string result;
  impl_->run_tasks(Op::broadcast, call, [&](OperationContext& context) {
    Objects objects(*impl_, call, context);
    std::int64_t length = rank() == root ? static_cast<std::int64_t>(object.size()) : 0;
    objects.broadcast(buffer_of(std::span(&length, 1)), root);
    result.assign(rank() == root ? object : std::string_view());
    result.resize(length);
    objects.broadcast(bytes_of(result), root);
  });
  return result;
}

std::vector<std::string> ProcessGroup::gather_objects(std::string_view object, int root, const CallOptions& options,
                                                      const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("gather_objects")) return {};
  require_root(root, size());
  std::vector<std::string> result;
  impl_->run_tasks(Op::gather, call, [&](OperationContext& context) {
    Objects objects(*impl_, call, context);
    const auto lengths = objects.lengths(object.size());
    const std::string all = objects.gather(object, root, lengths);
    if (rank() == root) result = cut(all, lengths);
  });
  return result;
}

std::vector<std::string> ProcessGroup::all_gather_objects(std::string_view object, const CallOptions& options,
                                                          const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("all_gather_objects")) return {};
  std::vector<std::string> result;
  impl_->run_tasks(Op::all_gather, call, [&](OperationContext& context) {
    Objects objects(*impl_, call, context);
    const auto lengths = objects.lengths(object.size());
    result = cut(objects.all_gather(object, lengths), lengths);
  });
  return result;
}

std::string ProcessGroup::scatter_objects(std::span<const std::string> given, int root, const CallOptions& options,
                                          const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("scatter_objects")) return {};
  require_root(root, size());
  MANIPLE_REQUIRE(rank() != root || std::ssize(given) == size(), "scatter_objects: {} objects for {} ranks",
                  given.size(), size());
  std::string result;
  impl_->run_tasks(Op::scatter, call, [&](OperationContext& context) {
    Objects objects(*impl_, call, context);
    std::vector<std::int64_t> lengths(size());
    std::string all;
    if (rank() == root) {
      for (std::size_t i = 0; i < given.size(); ++i) {
        lengths[i] = static_cast<std::int64_t>(given[i].size());
        all += given[i];
      }
    }
    objects.broadcast(buffer_of(lengths), root);
    result = objects.scatter(all, root, std::vector<std::size_t>(lengths.begin(), lengths.end()));
  });
  return result;
}

}  // namespace maniple
