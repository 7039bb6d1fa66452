#include "comm/base/environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"

namespace maniple {
namespace {

using Kind = Permitted::Kind;

constexpr std::size_t kMaxShown = 80;

constexpr Permitted flag() { return {.kind = Kind::flag, .low = 0, .high = 1}; }
constexpr Permitted whole(std::int64_t low, std::int64_t high) {
  return {.kind = Kind::whole, .low = static_cast<double>(low), .high = static_cast<double>(high)};
}
constexpr Permitted whole_or(std::int64_t besides, std::int64_t low, std::int64_t high, const char* reason = "") {
  Permitted permitted = whole(low, high);
  permitted.besides = static_cast<double>(besides);
  permitted.what = reason;
  return permitted;
}
constexpr Permitted number(double low, double high) { return {.kind = Kind::number, .low = low, .high = high}; }
constexpr Permitted number_or(double besides, double low, double high) {
  return {.kind = Kind::number, .low = low, .high = high, .besides = besides};
}
template <class... Words>
constexpr Permitted one_of(Words... words) {
  return {.kind = Kind::word, .words = {words...}};
}
constexpr Permitted text(const char* what, std::size_t most_bytes = 0) {
  return {.kind = Kind::text, .what = what, .most_bytes = most_bytes};
}

// tests/style/check.sh parses this table and compares it with docs/failure.md.
constexpr KnobInfo kKnobs[] = {
    {Knob::log, "MANIPLE_LOG", "warning", one_of("debug", "info", "warning", "error", "off"),
     "least important lines shown"},
    {Knob::transport, "MANIPLE_TRANSPORT", "auto", one_of("auto", "loopback", "shm", "tcp"), "overrides the transport",
     Scope::world},
    {Knob::algorithm, "MANIPLE_ALGORITHM", "", text("an algorithm"),
     "overrides the algorithm, by the name `maniple bench --list` shows", Scope::world},
    {Knob::interface_name, "MANIPLE_INTERFACE", "", text("an interface"),
     "network interface for data; default: the route to the master"},
    {Knob::allow_no_secret, "MANIPLE_ALLOW_NO_SECRET", "0", flag(),
     "1: leave loopback without a job secret (trusted networks)"},
    {Knob::heartbeat_s, "MANIPLE_HEARTBEAT", "2.5", number(0, 1000000),
     "seconds of silence after which a rank counts as lost; 0: never", Scope::world},
    {Knob::tcp_streams, "MANIPLE_TCP_STREAMS", "2", whole(1, 16), "connections between two ranks"},
    {Knob::tcp_buffer_kib, "MANIPLE_TCP_BUFFER_KIB", "0",
     whole_or(0, 64, 1048576, "a buffer smaller than a packet stalls TCP and loopback sends packets of 64 KiB"),
     "socket buffer size; 0: the kernel's own tuning"},
    {Knob::tcp_congestion, "MANIPLE_TCP_CONGESTION", "", text("a name"),
     "congestion control, such as cubic; default: the system's, but not bbr where a packet is back within 1 ms"},
    {Knob::tcp_checksum, "MANIPLE_TCP_CHECKSUM", "1", flag(),
     "0: no CRC-32C of data over TCP; damage that TCP's own checksum misses is not noticed"},
    {Knob::encrypt, "MANIPLE_ENCRYPT", "0", flag(), "1: encrypt and authenticate data between ranks over TCP",
     Scope::world},
    {Knob::stage_kib, "MANIPLE_STAGE_KIB", "0", whole_or(0, 16, 1048576),
     "shared stage per rank, 32 bytes times ranks or more; 0: by ranks and caches. The first rank of a host decides"},
    {Knob::spin_us, "MANIPLE_SPIN_US", "-1", number_or(-1, 0, 1000000),
     "microseconds to spin before yielding, or sleeping for TCP; -1: by cores and ranks"},
    {Knob::checks, "MANIPLE_CHECKS", "1", flag(), "0: do not compare what ranks call (for measuring its cost)",
     Scope::world},
    {Knob::recorder, "MANIPLE_RECORDER", "256", whole(0, 1048576), "operations kept by the flight recorder; 0: none"},
    {Knob::wait_report_s, "MANIPLE_WAIT_REPORT", "10", number(0, 1000000),
     "seconds until a waiting rank reports which ranks it waits for, then at growing intervals; 0: never"},
    {Knob::unexpected_mib, "MANIPLE_UNEXPECTED_MIB", "1024", whole(1, 1048576),
     "limit of memory for unexpected messages"},
    {Knob::host, "MANIPLE_HOST", "", text("a name", 255),
     "pretend to be on a host of this name (tests of several hosts on one)"},
    {Knob::mkldnn, "MANIPLE_MKLDNN", "auto", one_of("auto", "measure", "on", "off"),
     "convolutions by oneDNN (apply_fast_settings)"},
    {Knob::mpi, "MANIPLE_MPI", "auto", one_of("auto", "openmpi", "mpich"),
     "which MPI the backend mpi is; auto: the MPI whose mpirun started the process, else Open MPI", Scope::world},
    {Knob::mpi_piece, "MANIPLE_MPI_PIECE", "268435456", whole(1, 268435456),
     "most elements (bytes of a broadcast) in one call of MPI, which counts in int", Scope::world},
    {Knob::plugins, "MANIPLE_PLUGINS", "", text("a folder"), "folder with the plugins; default: libexec/maniple"},
    {Knob::crash_trace, "MANIPLE_CRASH_TRACE", "1", flag(), "0: do not print the stack of a thread that crashes"},
};

// Parses the whole text as a number in C notation, independent of the locale: without blanks, plus sign or hexadecimal.
template <class Number>
std::optional<Number> parse(std::string_view text) noexcept {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_within(const Permitted& permitted, double value) noexcept {
  return (value >= permitted.low && value <= permitted.high) || value == permitted.besides;
}

std::span<const std::string_view> words_of(const Permitted& permitted) noexcept {
  const auto end = std::find(permitted.words.begin(), permitted.words.end(), std::string_view());
  return {permitted.words.begin(), end};
}

std::string wrong(const KnobInfo& entry, std::string_view value) {
  const Permitted& permitted = entry.permitted;
  const std::string besides = permitted.besides ? fmt::format("{:.0f} or ", *permitted.besides) : "";
  switch (permitted.kind) {
    case Kind::flag: return fmt::format("{} is \"{}\"; expected 0 or 1", entry.name, shown(value));
    case Kind::whole: {
      const std::string reason = *permitted.what == '\0' ? "" : fmt::format(": {}", permitted.what);
      return fmt::format("{} is \"{}\"; expected {}a whole number from {:.0f} to {:.0f}{}", entry.name, shown(value),
                         besides, permitted.low, permitted.high, reason);
    }
    case Kind::number:
      return fmt::format("{} is \"{}\"; expected {}a number from {:.0f} to {:.0f}", entry.name, shown(value), besides,
                         permitted.low, permitted.high);
    case Kind::word:
      return fmt::format("{} is \"{}\"; expected one of {}", entry.name, shown(value),
                         fmt::join(words_of(permitted), ", "));
    case Kind::text: break;
  }
  return fmt::format("{} is \"{}\", {} bytes; expected at most {}", entry.name, shown(value), value.size(),
                     permitted.most_bytes);
}

std::string permitted_text(Knob knob, Kind kind) {
  const KnobInfo& entry = info(knob);
  MANIPLE_ASSERT(entry.permitted.kind == kind);
  std::string value = knob_text(knob);
  if (!is_permitted(entry.permitted, value)) throw InvalidArgument(wrong(entry, value));
  return value;
}

}  // namespace

std::span<const KnobInfo> knobs() noexcept { return kKnobs; }

const KnobInfo& info(Knob knob) noexcept { return kKnobs[static_cast<std::size_t>(knob)]; }

std::string to_string(const Permitted& permitted) {
  const std::string besides = permitted.besides ? fmt::format("{:.0f} or ", *permitted.besides) : "";
  switch (permitted.kind) {
    case Kind::flag: return "0 or 1";
    case Kind::whole: return fmt::format("{}{:.0f} to {:.0f}", besides, permitted.low, permitted.high);
    case Kind::number: return fmt::format("number, {}{:.0f} to {:.0f}", besides, permitted.low, permitted.high);
    case Kind::word: return fmt::format("{}", fmt::join(words_of(permitted), ", "));
    case Kind::text: break;
  }
  if (permitted.most_bytes > 0) return fmt::format("{}, up to {} bytes", permitted.what, permitted.most_bytes);
  return permitted.what;
}

bool is_permitted(const Permitted& permitted, std::string_view text) noexcept {
  switch (permitted.kind) {
    case Kind::flag: return text == "0" || text == "1";
    case Kind::whole: {
      const auto value = parse<std::int64_t>(text);
      return value && is_within(permitted, static_cast<double>(*value));
    }
    case Kind::number: {
      const auto value = parse<double>(text);
      return value && is_within(permitted, *value);
    }
    case Kind::word: {
      const auto words = words_of(permitted);
      return std::find(words.begin(), words.end(), text) != words.end();
    }
    case Kind::text: break;
  }
  return permitted.most_bytes == 0 || text.size() <= permitted.most_bytes;
}

std::string described(const KnobInfo& knob) {
  return knob.scope == Scope::world ? fmt::format("{}; alike on all ranks", knob.meaning) : knob.meaning;
}

std::string canonical_text(const KnobInfo& knob, std::string_view value) {
  if (value.empty()) value = knob.default_text;
  if (knob.permitted.kind == Kind::whole) {
    if (const auto whole = parse<std::int64_t>(value)) return std::to_string(*whole);
  } else if (knob.permitted.kind == Kind::number) {
    if (const auto number = parse<double>(value)) return fmt::format("{}", *number == 0 ? 0.0 : *number);
  }
  return std::string(value);
}

std::vector<std::string> wrong_knobs(const ReadVariable& read) {
  std::vector<std::string> sentences;
  for (const KnobInfo& entry : kKnobs) {
    const auto value = read(entry.name);
    if (value && !is_permitted(entry.permitted, *value)) sentences.push_back(wrong(entry, *value));
  }
  return sentences;
}

std::string knob_text(Knob knob) {
  const KnobInfo& entry = info(knob);
  return environment_text(entry.name).value_or(entry.default_text);
}

std::string knob_word(Knob knob) { return permitted_text(knob, Kind::word); }

double knob_number(Knob knob) { return *parse<double>(permitted_text(knob, Kind::number)); }

std::int64_t knob_integer(Knob knob) { return *parse<std::int64_t>(permitted_text(knob, Kind::whole)); }

bool knob_flag(Knob knob) { return permitted_text(knob, Kind::flag) == "1"; }

std::optional<std::string> environment_text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

void require_not_empty(const char* name) {
  const char* value = std::getenv(name);
  MANIPLE_REQUIRE(value == nullptr || *value != '\0', "{} is set, but empty; give it a value, or unset it", name);
}

std::optional<std::int64_t> environment_integer(const char* name, std::int64_t low, std::int64_t high) {
  const auto text = environment_text(name);
  if (!text) return std::nullopt;
  const auto value = parse<std::int64_t>(*text);
  MANIPLE_REQUIRE(value && *value >= low && *value <= high, "{} is \"{}\"; expected a whole number from {} to {}", name,
                  shown(*text), low, high);
  return value;
}

std::string shown(std::string_view text) {
  std::string line;
  for (const unsigned char byte : text.substr(0, kMaxShown)) {
    if (byte < 0x20 || byte == 0x7f) {
      line += fmt::format("\\x{:02x}", byte);
    } else {
      line += static_cast<char>(byte);
    }
  }
  return text.size() > kMaxShown ? line + "..." : line;
}

}  // namespace maniple
