// Sizes and quantities, as people write and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace maniple::bench {

/// "4,1K,64K..16M": bytes with K, M, G for KiB, MiB, GiB; a range goes up by factors of 4 and includes its end.
/// Throws InvalidArgument naming the part that is wrong.
std::vector<std::uint64_t> parse_sizes(std::string_view text);

std::string format_bytes(std::uint64_t bytes);              ///< "4 B", "1 KiB", "256 MiB"; not whole: "1.5 MiB"
std::string format_time(double microseconds);               ///< "0.41 us", "13.2 ms", "1.20 s": three digits
std::string format_bandwidth(double gigabytes_per_second);  ///< "38.1 GB/s", "8.70 MB/s"
std::string three_digits(double value);                     ///< "0.41", "13.2", "812"

/// "a,b" as its parts, without empty ones.
std::vector<std::string> split_list(std::string_view text);

}  // namespace maniple::bench
