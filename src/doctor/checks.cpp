#include "doctor/checks.h"

#include <array>

#include <fmt/format.h>

#include "doctor/kernel.h"
#include "doctor/network.h"
#include "doctor/resources.h"
#include "doctor/software.h"

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
      {"network", [] { return judge(inspect_network()); }},
      {"sharing", [] { return judge(inspect_sharing()); }},
      {"limits", [] { return judge(inspect_limits()); }},
      {"processors", [] { return judge(inspect_processors()); }},
      {"blas", [] { return judge(inspect_blas()); }},
      {"gpus", [] { return judge(inspect_gpus()); }},
      {"backends", [] { return judge(inspect_backends()); }},
      {"clock", [] { return judge(inspect_clock()); }},
      {"disk", [] { return judge(inspect_disk()); }},
  };
  return kChecks;
}

}  // namespace maniple::doctor
