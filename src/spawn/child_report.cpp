#include "spawn/child_report.h"

#include <cxxabi.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <typeinfo>

#include "base/codec.h"
#include "base/error_codec.h"

namespace maniple::launch {
namespace {

constexpr std::uint8_t kFinished = 1;
constexpr std::uint8_t kThrew = 2;
constexpr std::size_t kMostType = 4 * 1024;
constexpr std::size_t kMostText = 12 * 1024;  // of the text, and of the error

struct Free {
  void operator()(char* text) const noexcept { std::free(text); }
};

// "std::runtime_error", not "St13runtime_error".
std::string name_of_current_type() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "an exception of another language";
  int status = 0;
  const std::unique_ptr<char, Free> plain(abi::__cxa_demangle(type->name(), nullptr, nullptr, &status));
  return plain ? plain.get() : type->name();
}

}  // namespace

SpawnReport report_of_current_exception() noexcept {
  SpawnReport report;
  report.when_ns = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  try {
    report.type = name_of_current_type();
    throw;
  } catch (const Error& error) {
    report.error = error.info();
    report.text = error.what();
  } catch (const std::exception& error) {
    report.text = error.what();
  } catch (const std::string& text) {
    report.text = text;
  } catch (const char* text) {
    report.text = text != nullptr ? text : "";
  } catch (...) {
  }
  return report;
}

std::string encode_report(const SpawnReport& report) {
  ByteWriter out;
  out.put(report.finished ? kFinished : kThrew);
  out.put(report.when_ns);
  out.put_string(std::string_view(report.type).substr(0, kMostType));
  out.put_string(std::string_view(report.text).substr(0, kMostText));
  if (report.error) out.put_raw(encode_error(*report.error, kMostText));
  return out.take();
}

std::optional<SpawnReport> decode_report(std::string_view bytes) {
  try {
    ByteReader in(bytes);
    SpawnReport report;
    const auto what = in.get<std::uint8_t>();
    if (what != kFinished && what != kThrew) return std::nullopt;
    report.finished = what == kFinished;
    report.when_ns = in.get<std::int64_t>();
    report.type = in.get_string(kMostType);
    report.text = in.get_string(kMostText);
    if (in.left() > 0) report.error = decode_error(in.get_raw(in.left()));
    return report;
  } catch (const ProtocolError&) {
    return std::nullopt;
  }
}

}  // namespace maniple::launch
