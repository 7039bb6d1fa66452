// Formats text from a pattern and values, "rank {} of {}", in sources that may include LibTorch.
//
// Patterns use fmt's syntax, but this header does not instantiate fmt templates: LibTorch ships headers of another fmt
// version, and the order of include folders would decide which version a source gets. Instead, values are passed by
// kind to format.cpp, the only file that calls fmt. The compiler checks the number of values, and rejects number
// formats for text.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// One value of a pattern. Text values are views, valid for the duration of the call.
class FormatValue {
 public:
  enum class Kind : std::uint8_t { boolean, character, integer, natural, real32, real64, text };

  template <class T>
  static constexpr Kind kind_of() {
    using Plain = std::remove_cvref_t<T>;
    if constexpr (std::same_as<Plain, bool>) {
      return Kind::boolean;
    } else if constexpr (std::same_as<Plain, char>) {
      return Kind::character;
    } else if constexpr (std::same_as<Plain, float>) {
      return Kind::real32;  // its shortest text differs from the double's
    } else if constexpr (std::floating_point<Plain>) {
      return Kind::real64;
    } else if constexpr (std::signed_integral<Plain>) {
      return Kind::integer;
    } else if constexpr (std::unsigned_integral<Plain>) {
      return Kind::natural;
    } else {
      static_assert(std::convertible_to<const Plain&, std::string_view>, "neither a number nor a text; see joined()");
      return Kind::text;
    }
  }

  template <class T>
  FormatValue(const T& value) : kind(kind_of<T>()) {  // NOLINT: converts on purpose
    if constexpr (kind_of<T>() == Kind::text) {
      text = value;
    } else if constexpr (std::floating_point<T>) {
      real = static_cast<double>(value);
    } else if constexpr (kind_of<T>() == Kind::natural) {
      natural = value;
    } else {
      integer = value;
    }
  }

  Kind kind;
  union {
    std::int64_t integer;
    std::uint64_t natural;
    double real;
    std::string_view text;
  };
};

std::string format_values(std::string_view pattern, std::span<const FormatValue> values);

/// A pattern checked against the types of its values; a mismatch is a compile-time error.
template <class... Values>
class FormatPattern {
 public:
  template <std::convertible_to<std::string_view> Text>
  consteval FormatPattern(const Text& text) : text_(text) {  // NOLINT: converts on purpose
    constexpr FormatValue::Kind kinds[] = {FormatValue::kind_of<Values>()..., FormatValue::Kind::text};
    std::size_t used = 0;
    for (std::size_t i = 0; i < text_.size(); ++i) {
      if (text_[i] != '{' && text_[i] != '}') continue;
      if (i + 1 < text_.size() && text_[i + 1] == text_[i]) {
        ++i;
        continue;
      }
      if (text_[i] == '}') throw "a } without {";
      if (used >= sizeof...(Values)) throw "more {} than values";
      const FormatValue::Kind kind = kinds[used++];
      char type = '}';
      for (++i; i < text_.size() && text_[i] != '}'; ++i) {
        type = text_[i];
        if (text_[i] != '{') continue;  // a width or precision passed as a value
        if (used >= sizeof...(Values)) throw "more {} than values";
        ++used;
        if (++i >= text_.size() || text_[i] != '}') throw "a width by number is not understood here";
      }
      if (i >= text_.size()) throw "a { without }";
      const bool of_real = type == 'f' || type == 'e' || type == 'g';
      const bool of_whole = type == 'd' || type == 'x' || type == 'X' || type == 'b' || type == 'o';
      if (of_real && kind != FormatValue::Kind::real32 && kind != FormatValue::Kind::real64)
        throw "a format of reals for another value";
      if (of_whole && kind != FormatValue::Kind::integer && kind != FormatValue::Kind::natural)
        throw "a format of whole numbers";
    }
    if (used != sizeof...(Values)) throw "more values than {}";
  }
  std::string_view text() const noexcept { return text_; }

 private:
  std::string_view text_;
};

template <class... Values>
std::string format_text(FormatPattern<std::type_identity_t<Values>...> pattern, const Values&... values) {
  if constexpr (sizeof...(Values) == 0) {
    return format_values(pattern.text(), {});
  } else {
    const FormatValue list[] = {FormatValue(values)...};
    return format_values(pattern.text(), list);
  }
}

/// Joins the elements of a range of numbers or texts with `separator`: joined(tensor.sizes()) is "2, 3".
template <class Range>
std::string joined(const Range& range, std::string_view separator = ", ") {
  std::string all;
  bool first = true;
  for (const auto& element : range) {
    if (!first) all += separator;
    first = false;
    const FormatValue value(element);
    all += format_values("{}", {&value, 1});
  }
  return all;
}

// Text for terminals and for formats that require UTF-8.

/// Replaces every byte that is not part of a UTF-8 character by "?".
std::string valid_utf8(std::string_view text);

/// Like valid_utf8, and replaces control characters (line ends, escapes) by spaces, so the text cannot move the cursor.
std::string one_line(std::string_view text);

/// Terminal columns occupied by a text from one_line: East Asian characters and emoji take two, combining marks none.
std::size_t columns_of(std::string_view text);

/// Truncates to at most `columns` columns; a truncated text ends with "~" if `columns` is not 0.
std::string cut_to_columns(std::string_view text, std::size_t columns);

}  // namespace maniple
