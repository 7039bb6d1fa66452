#include "base/environment.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace maniple {
namespace {

constexpr KnobInfo kKnobs[] = {
    {Knob::log, "MANIPLE_LOG", "warning", "least important lines shown: debug, info, warning, error, off"},
    {Knob::transport, "MANIPLE_TRANSPORT", "auto", "overrides the transport: auto, loopback, shm, tcp"},
    {Knob::algorithm, "MANIPLE_ALGORITHM", "", "overrides the algorithm, by the name `maniple bench --list` shows"},
    {Knob::interface_name, "MANIPLE_INTERFACE", "", "network interface for data; default: the route to the master"},
    {Knob::allow_no_secret, "MANIPLE_ALLOW_NO_SECRET", "0", "1: leave loopback without a job secret (trusted networks)"},
    {Knob::heartbeat_s, "MANIPLE_HEARTBEAT", "2.5", "seconds of silence after which a rank counts as lost; 0: never"},
    {Knob::tcp_streams, "MANIPLE_TCP_STREAMS", "2", "connections between two ranks, 1 to 16"},
    {Knob::tcp_buffer_kib, "MANIPLE_TCP_BUFFER_KIB", "0", "socket buffer size; 0: the kernel's own tuning"},
    {Knob::tcp_congestion, "MANIPLE_TCP_CONGESTION", "", "congestion control, such as cubic; default: the system's"},
    {Knob::stage_kib, "MANIPLE_STAGE_KIB", "0", "shared staging memory per rank; 0: by ranks and caches. The first rank of a host decides"},
    {Knob::spin_us, "MANIPLE_SPIN_US", "-1", "microseconds to spin before yielding; -1: by cores and ranks"},
    {Knob::checks, "MANIPLE_CHECKS", "1", "0: do not compare what ranks call (for measuring its cost)"},
    {Knob::recorder, "MANIPLE_RECORDER", "256", "operations kept by the flight recorder; 0: none"},
    {Knob::unexpected_mib, "MANIPLE_UNEXPECTED_MIB", "1024", "limit of memory for messages nobody has asked for yet"},
    {Knob::host, "MANIPLE_HOST", "", "pretend to be on a host of this name (tests of several hosts on one)"},
    {Knob::mkldnn, "MANIPLE_MKLDNN", "auto", "convolutions by oneDNN: auto, measure, on, off (apply_fast_settings)"},
    {Knob::mpi, "MANIPLE_MPI", "auto", "which MPI the backend mpi is: openmpi, mpich; auto: that of the mpirun"},
    {Knob::mpi_piece, "MANIPLE_MPI_PIECE", "268435456", "most elements (bytes of a broadcast) in one call of MPI, which counts in int"},
    {Knob::plugins, "MANIPLE_PLUGINS", "", "folder with the engines of other backends; default: libexec/maniple"},
};

}  // namespace

std::span<const KnobInfo> knobs() noexcept { return kKnobs; }

const KnobInfo& info(Knob knob) noexcept { return kKnobs[static_cast<std::size_t>(knob)]; }

std::string knob_text(Knob knob) {
  const KnobInfo& entry = info(knob);
  const char* value = std::getenv(entry.name);
  return value != nullptr && *value != '\0' ? value : entry.default_text;
}

double knob_number(Knob knob, double low, double high) {
  const std::string text = knob_text(knob);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  MANIPLE_REQUIRE(end == text.c_str() + text.size() && !text.empty() && value >= low && value <= high,
                  "{} is \"{}\"; expected a number from {} to {}", info(knob).name, text, low, high);
  return value;
}

std::int64_t knob_integer(Knob knob, std::int64_t low, std::int64_t high) {
  const std::string text = knob_text(knob);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  MANIPLE_REQUIRE(error == std::errc() && end == text.data() + text.size() && value >= low && value <= high,
                  "{} is \"{}\"; expected a whole number from {} to {}", info(knob).name, text, low, high);
  return value;
}

bool knob_flag(Knob knob) { return knob_integer(knob, 0, 1) != 0; }

std::optional<std::string> environment_text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::int64_t> environment_integer(const char* name, std::int64_t low, std::int64_t high) {
  const auto text = environment_text(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  MANIPLE_REQUIRE(error == std::errc() && end == text->data() + text->size() && value >= low && value <= high,
                  "{} is \"{}\"; expected a whole number from {} to {}", name, *text, low, high);
  return value;
}

}  // namespace maniple
