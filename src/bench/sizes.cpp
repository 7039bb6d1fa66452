#include "bench/sizes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/check.h"

namespace maniple::bench {
namespace {

constexpr std::uint64_t kLargest = std::uint64_t{1} << 40;
constexpr std::uint64_t kStep = 4;

std::uint64_t parse_size(std::string_view text) {
  std::uint64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  const std::string_view suffix(end, static_cast<std::size_t>(last - end));
  int shift = -1;
  if (suffix.empty() || suffix == "B") shift = 0;
  if (suffix == "K" || suffix == "k" || suffix == "KiB") shift = 10;
  if (suffix == "M" || suffix == "m" || suffix == "MiB") shift = 20;
  if (suffix == "G" || suffix == "g" || suffix == "GiB") shift = 30;
  MANIPLE_REQUIRE(error == std::errc() && shift >= 0 && value <= (kLargest >> shift) && value > 0,
                  "\"{}\" is not a size; expected bytes such as 4, 64K, 16M or 1G", text);
  return value << shift;
}

void add_range(std::uint64_t from, std::uint64_t to, std::vector<std::uint64_t>& sizes) {
  MANIPLE_REQUIRE(from <= to, "the range of sizes {}..{} goes down", from, to);
  for (std::uint64_t size = from; size < to; size *= kStep) sizes.push_back(size);
  sizes.push_back(to);
}

}  // namespace

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    if (comma != 0) parts.emplace_back(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return parts;
}

std::vector<std::uint64_t> parse_sizes(std::string_view text) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& part : split_list(text)) {
    const std::size_t dots = part.find("..");
    if (dots == std::string::npos) {
      sizes.push_back(parse_size(part));
    } else {
      add_range(parse_size(std::string_view(part).substr(0, dots)), parse_size(std::string_view(part).substr(dots + 2)),
                sizes);
    }
  }
  MANIPLE_REQUIRE(!sizes.empty(), "no sizes in \"{}\"; expected a list such as 4,1K,1M or a range such as 4..256M",
                  text);
  return sizes;
}

std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  auto value = static_cast<double>(bytes);
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return value == std::floor(value) ? fmt::format("{:.0f} {}", value, kUnits[unit])
                                    : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string format_time(double microseconds) {
  if (microseconds < 999.5) return three_digits(microseconds) + " us";
  if (microseconds < 999'500) return three_digits(microseconds / 1e3) + " ms";
  return three_digits(microseconds / 1e6) + " s";
}

std::string format_bandwidth(double gigabytes_per_second) {
  if (gigabytes_per_second < 0.0995) return three_digits(gigabytes_per_second * 1e3) + " MB/s";
  return three_digits(gigabytes_per_second) + " GB/s";
}

}  // namespace maniple::bench
