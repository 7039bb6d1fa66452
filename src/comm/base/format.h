// Text from a pattern and values, "rank {} of {}", in sources that may see LibTorch.
//
// The patterns are those of the fmt library, but no template of fmt is instantiated here: LibTorch brings headers of a
// fmt of its own, of another version than the system's, and which of the two a source would get depends on the order of
// include folders. Values are handed over by kind to format.cpp, the one place that calls fmt. The number of values,
// and whether a number is asked for where a text is given, is checked when the program is compiled. Further down: texts
// made fit for terminals.
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

/// One value of a pattern. Holds views: it lives as long as the call.
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
      return Kind::real32;  // its shortest text is not that of the double
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

/// A pattern that fits values of these types; one that does not is an error of compilation.
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
        if (text_[i] != '{') continue;  // a width or precision that is a value, too
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

/// The elements of a range of numbers or texts, with `separator` between them: joined(tensor.sizes()) is "2, 3".
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

// Texts for terminals and for formats that insist on UTF-8.

/// The text with every byte that belongs to no UTF-8 character replaced by "?".
std::string valid_utf8(std::string_view text);

/// The same, with control characters (line ends, escapes) replaced by spaces: it cannot move the cursor.
std::string one_line(std::string_view text);

/// How many columns of a terminal a text from one_line takes: East Asian characters and emoji take two, combining marks
/// none.
std::size_t columns_of(std::string_view text);

/// As much of its beginning as fits; a text that does not fit ends with "~", where there is a column.
std::string cut_to_columns(std::string_view text, std::size_t columns);

}  // namespace maniple
