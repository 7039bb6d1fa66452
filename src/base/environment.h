// Every MANIPLE_ variable that changes behaviour, in one table: name, default, meaning. `maniple knobs` prints it.
// Variables by which ranks find each other (RANK, MASTER_ADDR, ...) are not knobs; see rendezvous/.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace maniple {

enum class Knob {
  log,
  transport,
  algorithm,
  interface_name,
  allow_no_secret,
  heartbeat_s,
  tcp_streams,
  tcp_buffer_kib,
  tcp_congestion,
  stage_kib,
  spin_us,
  checks,
  recorder,
  unexpected_mib,
  host,
  mkldnn,
  mpi,
  mpi_piece,
  plugins,
};

struct KnobInfo {
  Knob knob;
  const char* name;
  const char* default_text;
  const char* meaning;
};
std::span<const KnobInfo> knobs() noexcept;
const KnobInfo& info(Knob knob) noexcept;

/// The value from the environment, or the default. The number forms throw InvalidArgument naming variable, value and
/// what was expected.
std::string knob_text(Knob knob);
double knob_number(Knob knob, double low, double high);
std::int64_t knob_integer(Knob knob, std::int64_t low, std::int64_t high);
bool knob_flag(Knob knob);

/// A plain variable; nullopt when unset or empty.
std::optional<std::string> environment_text(const char* name);
/// A plain whole number; nullopt when unset; throws InvalidArgument naming the variable, its value and the range.
std::optional<std::int64_t> environment_integer(const char* name, std::int64_t low, std::int64_t high);

}  // namespace maniple
