#include "base/format.h"

#include <fmt/args.h>
#include <fmt/format.h>

namespace maniple {

std::string format_values(std::string_view pattern, std::span<const FormatValue> values) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  store.reserve(values.size(), 0);
  for (const FormatValue& value : values) {
    switch (value.kind) {
      case FormatValue::Kind::boolean: store.push_back(value.integer != 0); break;
      case FormatValue::Kind::character: store.push_back(static_cast<char>(value.integer)); break;
      case FormatValue::Kind::integer: store.push_back(static_cast<long long>(value.integer)); break;
      case FormatValue::Kind::natural: store.push_back(static_cast<unsigned long long>(value.natural)); break;
      case FormatValue::Kind::real32: store.push_back(static_cast<float>(value.real)); break;
      case FormatValue::Kind::real64: store.push_back(value.real); break;
      case FormatValue::Kind::text: store.push_back(fmt::string_view(value.text.data(), value.text.size())); break;
    }
  }
  return fmt::vformat(fmt::string_view(pattern.data(), pattern.size()), store);
}

}  // namespace maniple
