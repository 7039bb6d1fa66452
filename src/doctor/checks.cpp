#include "doctor/checks.h"

#include <array>

#include <fmt/format.h>

#include "doctor/blas.h"
#include "doctor/clock.h"
#include "doctor/disk.h"
#include "doctor/backends.h"
#include "doctor/gpus.h"
#include "doctor/limits.h"
#include "doctor/network.h"
#include "doctor/processors.h"
#include "doctor/sharing.h"

namespace maniple::doctor {

const char* to_string(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::ok: return "ok";
    case Verdict::warn: return "warn";
    case Verdict::fail: return "FAIL";
  }
  return "?";
}

std::string size_text(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit > 0 && bytes < 10 ? 1 : 0, kUnits[unit]);
}

std::span<const Check> checks() noexcept {
  static constexpr Check kChecks[] = {
      {"network", [] { return judge(look_at_network()); }}, {"sharing", [] { return judge(look_at_sharing()); }},
      {"limits", [] { return judge(look_at_limits()); }},   {"processors", [] { return judge(look_at_processors()); }},
      {"blas", [] { return judge(look_at_blas()); }},       {"gpus", [] { return judge(look_at_gpus()); }},
      {"engines", [] { return judge(look_at_backends()); }}, {"clock", [] { return judge(look_at_clock()); }},
      {"disk", [] { return judge(look_at_disk()); }},
  };
  return kChecks;
}

}  // namespace maniple::doctor
