#include "store.h"

#include <exception>
#include <vector>

namespace maniple_torch {
namespace {

using Pointer = c10::intrusive_ptr<c10d::Store>;

c10d::Store& store_in(void* context) { return **static_cast<Pointer*>(context); }
std::string text(maniple_bytes bytes) { return {bytes.data, bytes.size}; }
std::vector<std::uint8_t> value(maniple_bytes bytes) { return {bytes.data, bytes.data + bytes.size}; }

void hand_over(const std::vector<std::uint8_t>& bytes, maniple_reply reply, void* to) {
  reply(to, reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Usually a rank's process hosts the server, so a store error means that this process has ended.
template <class Body>
maniple_error* guarded(Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    const std::string reason = std::string("the store of torch.distributed failed: ") + error.what();
    return maniple_error_new(MANIPLE_PEER_LOST, reason.substr(0, reason.find('\n')).c_str());
  }
}

maniple_error* set(void* context, maniple_bytes key, maniple_bytes bytes) {
  return guarded([&] { store_in(context).set(text(key), value(bytes)); });
}

maniple_error* get(void* context, maniple_bytes key, maniple_reply reply, void* to) {
  return guarded([&] { hand_over(store_in(context).get(text(key)), reply, to); });
}

maniple_error* has_all(void* context, const maniple_bytes* keys, size_t count, int* all) {
  return guarded([&] {
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) names.push_back(text(keys[i]));
    *all = store_in(context).check(names) ? 1 : 0;
  });
}

maniple_error* add(void* context, maniple_bytes key, int64_t delta, int64_t* sum) {
  return guarded([&] { *sum = store_in(context).add(text(key), delta); });
}

maniple_error* compare_set(void* context, maniple_bytes key, maniple_bytes expected, maniple_bytes desired,
                           maniple_reply reply, void* to) {
  return guarded(
      [&] { hand_over(store_in(context).compareSet(text(key), value(expected), value(desired)), reply, to); });
}

maniple_error* erase(void* context, maniple_bytes key, int* existed) {
  return guarded([&] { *existed = store_in(context).deleteKey(text(key)) ? 1 : 0; });
}

void release(void* context) { delete static_cast<Pointer*>(context); }

}  // namespace

maniple_store store_of(c10::intrusive_ptr<c10d::Store> store, const std::string& description) {
  return {new Pointer(std::move(store)), set, get, has_all, add, compare_set, erase, release, description.c_str()};
}

}  // namespace maniple_torch
