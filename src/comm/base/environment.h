// Knobs: every MANIPLE_ variable that changes behaviour, in one table of name, default, permitted values and meaning.
// `maniple knobs` prints the table; `init` and `maniple run` validate all knobs before they do anything else. Variables
// by which ranks find each other (RANK, MASTER_ADDR, MANIPLE_JOB, ...) are not knobs; see rendezvous/ and
// own_variables.h.
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

/// The values a knob accepts.
struct Permitted {
  enum class Kind {
    flag,    ///< 0 or 1
    whole,   ///< an integer
    number,  ///< a real number
    word,    ///< one of `words`
    text,    ///< anything; its user may still reject it (unknown interface or algorithm)
  };
  Kind kind = Kind::text;
  double low = 0;  ///< range of a whole or number, inclusive
  double high = 0;
  std::optional<double> besides = {};          ///< an accepted value outside low..high with a special meaning
  std::array<std::string_view, 5> words = {};  ///< of a word; unused entries are empty
  const char* what = "";                       ///< of a text: "a folder"; of a number: the reason for its limits
  std::size_t most_bytes = 0;                  ///< of a text; 0: no limit
};

enum class Scope {
  rank,   ///< each rank may have its own value
  world,  ///< init() fails if ranks have different values
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

/// The meaning for user-facing tables; notes when all ranks must agree (Scope::world).
std::string described(const KnobInfo& knob);

/// The permitted values, for a table: "1 to 16", "0 or 16 to 1048576", "number, 0 to 1000000", "auto, openmpi, mpich",
/// "a folder", "a name, up to 255 bytes".
std::string to_string(const Permitted& permitted);
bool is_permitted(const Permitted& permitted, std::string_view text) noexcept;

/// Reads a variable; nullopt when it is unset or empty. Lets wrong_knobs() check the environment of another process.
using ReadVariable = std::function<std::optional<std::string>(const char* name)>;

/// Validates all knobs. Returns one sentence for each invalid knob, in table order, with the variable, its value and
/// the expected values.
std::vector<std::string> wrong_knobs(const ReadVariable& read);

/// The value from the environment, or the default when the variable is unset or empty. All but knob_text require a knob
/// of the matching kind, and throw InvalidArgument with the variable, its value and the expected values.
std::string knob_text(Knob knob);
std::string knob_word(Knob knob);
double knob_number(Knob knob);
std::int64_t knob_integer(Knob knob);
bool knob_flag(Knob knob);

/// Equal values give equal text: "60", "60.0" and "6e1" are "60" for a number; an empty value is the default.
std::string canonical_text(const KnobInfo& knob, std::string_view value);

/// An environment variable that is not a knob; nullopt when unset or empty.
std::optional<std::string> environment_text(const char* name);
/// Throws InvalidArgument if the variable is set but empty, as after `export NAME=$UNSET`. For variables that may be
/// unset.
void require_not_empty(const char* name);
/// The maximum of WORLD_SIZE.
inline constexpr int kMaxWorldSize = 1 << 20;
/// An integer variable that is not a knob; nullopt when unset or empty. Throws InvalidArgument with the variable, its
/// value and the range.
std::optional<std::int64_t> environment_integer(const char* name, std::int64_t low, std::int64_t high);

/// `text` made safe for one line of output: control characters escaped, long text truncated.
std::string shown(std::string_view text);

}  // namespace maniple
