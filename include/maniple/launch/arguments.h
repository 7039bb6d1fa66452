// How maniple::spawn copies arguments to another process.
//
// These types are sent as they are: numbers, bool, enumerations, std::string, std::chrono::duration, and std::vector,
// array, pair, tuple, optional, map, multimap, set, multiset, unordered_map and unordered_set of such types. Any other
// type needs two functions in its own namespace:
//
//   struct Plan { int epochs; std::string data; };
//   void encode(maniple::ArgumentWriter& out, const Plan& plan) { out.put(plan.epochs); out.put(plan.data); }
//   void decode(maniple::ArgumentReader& in, Plan& plan) { in.get(plan.epochs); in.get(plan.data); }
//
// Types need a default constructor. Both ends are the same program on the same machine, so numbers keep their native
// form.
//
// Errors: the reader still validates its input. Truncated or impossible input is a ProtocolError, thrown before memory
// is allocated for it.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <maniple/comm/error.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

class ArgumentWriter;
class ArgumentReader;

namespace detail {

template <class T>
concept OwnCode = requires(ArgumentWriter& out, ArgumentReader& in, const T& value, T& place) {
  encode(out, value);
  decode(in, place);
};

template <class T>
concept Number = std::is_arithmetic_v<T> || std::is_enum_v<T>;

template <class T>
inline constexpr bool is_bulk = Number<T> && !std::is_same_v<T, bool>;

template <class T, template <class...> class Template>
inline constexpr bool is_a = false;
template <template <class...> class Template, class... Parts>
inline constexpr bool is_a<Template<Parts...>, Template> = true;

template <class T>
inline constexpr bool is_array = false;
template <class T, std::size_t N>
inline constexpr bool is_array<std::array<T, N>> = true;

template <class T>
inline constexpr bool is_map = is_a<T, std::map> || is_a<T, std::multimap> || is_a<T, std::unordered_map>;
template <class T>
inline constexpr bool is_set = is_a<T, std::set> || is_a<T, std::multiset> || is_a<T, std::unordered_set>;
template <class T>
inline constexpr bool is_product = is_a<T, std::pair> || is_a<T, std::tuple> || is_array<T>;

template <class T>
inline constexpr bool always_false = false;

template <class T>
constexpr void refuse_type() {
  static_assert(!std::is_pointer_v<T> || always_false<T>,
                "maniple::spawn: a pointer means nothing in another process; pass the value it points to");
  static_assert(std::is_pointer_v<T> || always_false<T>,
                "maniple::spawn: this type cannot be sent to another process. Write, in its own namespace, "
                "void encode(maniple::ArgumentWriter&, const T&) and void decode(maniple::ArgumentReader&, T&), "
                "or pass its parts (see maniple/launch/arguments.h)");
}

}  // namespace detail

class ArgumentWriter {
 public:
  template <class T>
  void put(const T& value) {
    if constexpr (detail::Number<T>) {
      put_bytes(&value, sizeof value);
    } else if constexpr (std::is_same_v<T, std::string>) {
      put_count(value.size());
      put_bytes(value.data(), value.size());
    } else if constexpr (detail::is_a<T, std::chrono::duration>) {
      put(value.count());
    } else if constexpr (detail::is_a<T, std::optional>) {
      put(value.has_value());
      if (value) put(*value);
    } else if constexpr (detail::is_a<T, std::vector>) {
      put_vector(value);
    } else if constexpr (detail::is_product<T>) {
      // An empty type takes a byte, too: the reader checks element counts against the bytes left.
      if constexpr (std::tuple_size_v<T> == 0) put(true);
      std::apply([this](const auto&... part) { (this->put(part), ...); }, value);
    } else if constexpr (detail::is_map<T> || detail::is_set<T>) {
      put_count(value.size());
      for (const auto& element : value) put(element);
    } else if constexpr (detail::OwnCode<T>) {
      put(true);
      encode(*this, value);
    } else {
      detail::refuse_type<T>();
    }
  }

  void put_bytes(const void* bytes, std::size_t count) {
    if (count > 0) bytes_.append(static_cast<const char*>(bytes), count);
  }

  const std::string& bytes() const noexcept { return bytes_; }
  std::string take() noexcept { return std::move(bytes_); }

 private:
  void put_count(std::size_t count) { put(static_cast<std::uint64_t>(count)); }

  template <class E, class Allocator>
  void put_vector(const std::vector<E, Allocator>& value) {
    put_count(value.size());
    if constexpr (detail::is_bulk<E>) {
      put_bytes(value.data(), value.size() * sizeof(E));
    } else {
      for (const E& element : value) put(element);
    }
  }

  std::string bytes_;
};

class ArgumentReader {
 public:
  explicit ArgumentReader(std::string_view bytes) noexcept : bytes_(bytes) {}

  template <class T>
  void get(T& place) {
    if constexpr (std::is_same_v<T, bool>) {
      const char byte = *get_bytes(1);
      if (byte != 0 && byte != 1) throw ProtocolError("an argument of spawn: a bool that is neither true nor false");
      place = byte == 1;
    } else if constexpr (detail::Number<T>) {
      std::memcpy(&place, get_bytes(sizeof place), sizeof place);
    } else if constexpr (std::is_same_v<T, std::string>) {
      const std::size_t count = get_count(1);
      place.assign(get_bytes(count), count);
    } else if constexpr (detail::is_a<T, std::chrono::duration>) {
      place = T(get<typename T::rep>());
    } else if constexpr (detail::is_a<T, std::optional>) {
      place.reset();
      if (get<bool>()) place.emplace(get<typename T::value_type>());
    } else if constexpr (detail::is_a<T, std::vector>) {
      get_vector(place);
    } else if constexpr (detail::is_product<T>) {
      if constexpr (std::tuple_size_v<T> == 0) get<bool>();
      std::apply([this](auto&... part) { (this->get(part), ...); }, place);
    } else if constexpr (detail::is_map<T>) {
      place.clear();
      for (std::size_t left = get_count(1); left > 0; --left) {
        auto key = get<typename T::key_type>();
        place.emplace(std::move(key), get<typename T::mapped_type>());
      }
    } else if constexpr (detail::is_set<T>) {
      place.clear();
      for (std::size_t left = get_count(1); left > 0; --left) place.insert(get<typename T::value_type>());
    } else if constexpr (detail::OwnCode<T>) {
      get<bool>();
      decode(*this, place);
    } else {
      detail::refuse_type<T>();
    }
  }

  template <class T>
  T get() {
    static_assert(std::is_default_constructible_v<T>, "maniple::spawn: types of arguments need a default constructor");
    T value{};
    get(value);
    return value;
  }

  const char* get_bytes(std::size_t count) {
    if (count > bytes_.size())
      throw ProtocolError("arguments of spawn: truncated: " + std::to_string(count) + " bytes expected, " +
                          std::to_string(bytes_.size()) + " left");
    const char* bytes = bytes_.data();
    bytes_.remove_prefix(count);
    return bytes;
  }

  std::size_t left() const noexcept { return bytes_.size(); }
  void expect_end() const {
    if (!bytes_.empty())
      throw ProtocolError("arguments of spawn: " + std::to_string(bytes_.size()) + " bytes too many");
  }

 private:
  /// Reads the number of elements that follow, each at least `size` bytes.
  std::size_t get_count(std::size_t size) {
    const auto count = get<std::uint64_t>();
    if (count > bytes_.size() / size)
      throw ProtocolError("arguments of spawn: " + std::to_string(count) + " elements announced, " +
                          std::to_string(bytes_.size()) + " bytes left");
    return static_cast<std::size_t>(count);
  }

  template <class E, class Allocator>
  void get_vector(std::vector<E, Allocator>& place) {
    if constexpr (detail::is_bulk<E>) {
      const std::size_t count = get_count(sizeof(E));
      place.resize(count);
      if (count > 0) std::memcpy(place.data(), get_bytes(count * sizeof(E)), count * sizeof(E));
    } else {
      place.clear();
      for (std::size_t more = get_count(1); more > 0; --more) place.push_back(get<E>());
    }
  }

  std::string_view bytes_;
};

}  // namespace maniple
