// Every MANIPLE_ variable that changes behaviour, in one table: name, default, permitted values, meaning. `maniple
// knobs` prints it; `init` and `maniple run` check all of it before they do anything else. Variables by which ranks
// find each other (RANK, MASTER_ADDR, MANIPLE_JOB, ...) are not knobs; see rendezvous/ and own_variables.h.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

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
  tcp_checksum,
  encrypt,
  stage_kib,
  spin_us,
  checks,
  recorder,
  wait_report_s,
  unexpected_mib,
  host,
  mkldnn,
  mpi,
  mpi_piece,
  plugins,
  crash_trace,
};

/// What a knob may hold.
struct Permitted {
  enum class Kind {
    flag,    ///< 0 or 1
    whole,   ///< a whole number
    number,  ///< with a fraction or without
    word,    ///< one of several
    text,    ///< anything; who uses it may refuse it still (is there such an interface, such an algorithm?)
  };
  Kind kind = Kind::text;
  double low = 0;  ///< of whole and number
  double high = 0;
  std::optional<double> besides = {};          ///< a number outside of low to high with a meaning of its own
  std::array<std::string_view, 5> words = {};  ///< of word; those after the last are empty
  const char* what = "";                       ///< of text: "a folder"
  std::size_t most_bytes = 0;                  ///< of text; 0: any number
};

enum class Scope {
  rank,   ///< each rank may have a value of its own
  world,  ///< init() compares the values of all ranks and refuses a difference
};

struct KnobInfo {
  Knob knob;
  const char* name;
  const char* default_text;
  Permitted permitted;
  const char* meaning;
  Scope scope = Scope::rank;
};
std::span<const KnobInfo> knobs() noexcept;
const KnobInfo& info(Knob knob) noexcept;

/// The meaning as tables for people have it: with a note where the scope is the world.
std::string described(const KnobInfo& knob);

/// For a table: "1 to 16", "0 or 16 to 1048576", "number, 0 to 1000000", "auto, openmpi, mpich", "a folder",
/// "a name, up to 255 bytes".
std::string to_string(const Permitted& permitted);
/// Whether a text is permitted.
bool is_permitted(const Permitted& permitted, std::string_view text) noexcept;

/// How a variable is read; nullopt when it is unset or empty. For an environment that is not this process's own.
using ReadVariable = std::function<std::optional<std::string>(const char* name)>;

/// What is wrong with the knobs: for each wrong one a sentence that names variable, value and what was expected, in the
/// order of the table.
std::vector<std::string> wrong_knobs(const ReadVariable& read);

/// The value from the environment, or the default when that is unset or empty. All but knob_text are for knobs of their
/// kind, and throw InvalidArgument naming variable, value and what was expected.
std::string knob_text(Knob knob);
std::string knob_word(Knob knob);
double knob_number(Knob knob);
std::int64_t knob_integer(Knob knob);
bool knob_flag(Knob knob);

/// One text for all values that mean the same: "60", "60.0" and "6e1" are "60" for a number; unset is the default.
std::string canonical_text(const KnobInfo& knob, std::string_view value);

/// A plain variable; nullopt when unset or empty.
std::optional<std::string> environment_text(const char* name);
/// Throws InvalidArgument for a variable that is set to nothing, as `export NAME=$UNSET` does. For those whose absence
/// means something else than a mistake.
void require_not_empty(const char* name);
/// What WORLD_SIZE may be at most.
inline constexpr int kMaxWorldSize = 1 << 20;
/// A plain whole number; nullopt when unset or empty; throws InvalidArgument naming the variable, its value and the
/// range.
std::optional<std::int64_t> environment_integer(const char* name, std::int64_t low, std::int64_t high);

/// As it may stand in a line for people: control characters escaped, the end of a long text left out.
std::string shown(std::string_view text);

}  // namespace maniple
