// Finds the tensors inside a value: a tensor, or tuples, pairs, arrays, vectors, maps and optionals of these.
// DataParallel cuts the tensors of its arguments and concatenates the tensors of its results; the structure around them
// is preserved.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/data/example.h>
#include <torch/types.h>
#include <torch/version.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {
namespace detail {

/// Supplies replacement tensors, one after the other.
class TensorCursor {
 public:
  explicit TensorCursor(const std::vector<torch::Tensor>& tensors) : tensors_(tensors) {}
  const torch::Tensor& next() { return tensors_.at(at_++); }

 private:
  const std::vector<torch::Tensor>& tensors_;
  std::size_t at_ = 0;
};

/// Other types hold no tensors and are copied unchanged.
template <class T>
struct Nest {
  static constexpr bool kOnlyTensors = false;
  static void collect(const T&, std::vector<torch::Tensor>&) {}
  static T rebuild(const T& like, TensorCursor&) { return like; }
};

template <>
struct Nest<torch::Tensor> {
  static constexpr bool kOnlyTensors = true;
  static void collect(const torch::Tensor& value, std::vector<torch::Tensor>& to) { to.push_back(value); }
  static torch::Tensor rebuild(const torch::Tensor&, TensorCursor& from) { return from.next(); }
};

template <class T>
struct Nest<std::vector<T>> {
  static constexpr bool kOnlyTensors = Nest<T>::kOnlyTensors;
  static void collect(const std::vector<T>& value, std::vector<torch::Tensor>& to) {
    for (const T& one : value) Nest<T>::collect(one, to);
  }
  static std::vector<T> rebuild(const std::vector<T>& like, TensorCursor& from) {
    std::vector<T> result;
    result.reserve(like.size());
    for (const T& one : like) result.push_back(Nest<T>::rebuild(one, from));
    return result;
  }
};

/// Tuples, pairs and arrays.
template <class Tuple, class... Parts>
struct TupleNest {
  static constexpr bool kOnlyTensors = (Nest<Parts>::kOnlyTensors && ...);
  static void collect(const Tuple& value, std::vector<torch::Tensor>& to) {
    std::apply([&](const Parts&... parts) { (Nest<Parts>::collect(parts, to), ...); }, value);
  }
  static Tuple rebuild(const Tuple& like, [[maybe_unused]] TensorCursor& from) {
    return std::apply([&](const Parts&... parts) { return Tuple{Nest<Parts>::rebuild(parts, from)...}; }, like);
  }
};
template <class... Parts>
struct Nest<std::tuple<Parts...>> : TupleNest<std::tuple<Parts...>, Parts...> {};
template <class First, class Second>
struct Nest<std::pair<First, Second>> : TupleNest<std::pair<First, Second>, First, Second> {};

template <class T, std::size_t size>
struct Nest<std::array<T, size>> {
  static constexpr bool kOnlyTensors = Nest<T>::kOnlyTensors;
  static void collect(const std::array<T, size>& value, std::vector<torch::Tensor>& to) {
    for (const T& one : value) Nest<T>::collect(one, to);
  }
  static std::array<T, size> rebuild(std::array<T, size> like, TensorCursor& from) {
    for (T& one : like) one = Nest<T>::rebuild(one, from);
    return like;
  }
};

/// Dictionaries: the values in iteration order. An unordered dictionary may iterate in another order on every replica,
/// so it is sorted by key.
template <class Map>
struct MapNest {
  using Value = typename Map::mapped_type;
  static constexpr bool kOnlyTensors = Nest<Value>::kOnlyTensors;
  static std::map<typename Map::key_type, const Value*> sorted(const Map& map) {
    std::map<typename Map::key_type, const Value*> result;
    for (const auto& [key, value] : map) result.emplace(key, &value);
    return result;
  }
  static void collect(const Map& map, std::vector<torch::Tensor>& to) {
    for (const auto& [key, value] : sorted(map)) Nest<Value>::collect(*value, to);
  }
  static Map rebuild(const Map& like, TensorCursor& from) {
    Map result;
    for (const auto& [key, value] : sorted(like)) result.emplace(key, Nest<Value>::rebuild(*value, from));
    return result;
  }
};
template <class Key, class Value>
struct Nest<std::map<Key, Value>> : MapNest<std::map<Key, Value>> {};
template <class Key, class Value>
struct Nest<std::unordered_map<Key, Value>> : MapNest<std::unordered_map<Key, Value>> {};

/// std::optional, and LibTorch's own optional, which was a separate class before 2.5.
#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 5)
template <class T>
using TorchOptional = c10::optional<T>;
#else
template <class T>
using TorchOptional = std::optional<T>;
#endif
template <class T>
concept OptionalOf =
    requires { typename T::value_type; } && (std::is_same_v<T, std::optional<typename T::value_type>> ||
                                             std::is_same_v<T, TorchOptional<typename T::value_type>>);
template <OptionalOf T>
struct Nest<T> {
  using Value = typename T::value_type;
  static constexpr bool kOnlyTensors = Nest<Value>::kOnlyTensors;
  static void collect(const T& value, std::vector<torch::Tensor>& to) {
    if (value) Nest<Value>::collect(*value, to);
  }
  static T rebuild(const T& like, TensorCursor& from) { return like ? T(Nest<Value>::rebuild(*like, from)) : T(); }
};

template <class Data, class Target>
struct Nest<torch::data::Example<Data, Target>> {
  using Example = torch::data::Example<Data, Target>;
  static constexpr bool kOnlyTensors = Nest<Data>::kOnlyTensors && Nest<Target>::kOnlyTensors;
  static void collect(const Example& value, std::vector<torch::Tensor>& to) {
    Nest<Data>::collect(value.data, to);
    Nest<Target>::collect(value.target, to);
  }
  static Example rebuild(const Example& like, TensorCursor& from) {
    Data data = Nest<Data>::rebuild(like.data, from);
    return Example(std::move(data), Nest<Target>::rebuild(like.target, from));
  }
};
template <class Data>
struct Nest<torch::data::Example<Data, torch::data::example::NoTarget>> {
  using Example = torch::data::Example<Data, torch::data::example::NoTarget>;
  static constexpr bool kOnlyTensors = Nest<Data>::kOnlyTensors;
  static void collect(const Example& value, std::vector<torch::Tensor>& to) { Nest<Data>::collect(value.data, to); }
  static Example rebuild(const Example& like, TensorCursor& from) {
    return Example(Nest<Data>::rebuild(like.data, from));
  }
};

template <class T>
std::vector<torch::Tensor> tensors_in(const T& value) {
  std::vector<torch::Tensor> result;
  Nest<T>::collect(value, result);
  return result;
}

/// The same value with its tensors replaced.
template <class T>
T with_tensors(const T& like, const std::vector<torch::Tensor>& tensors) {
  TensorCursor cursor(tensors);
  return Nest<T>::rebuild(like, cursor);
}

}  // namespace detail
}  // namespace maniple
