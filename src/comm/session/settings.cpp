#include "comm/session/settings.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/rendezvous/round.h"
#include <maniple/version.h>

namespace maniple {
namespace {

constexpr const char* kVersion = "the version of Maniple";
constexpr std::size_t kMostHosts = 4;  // named in a message

// The variable's name, with the option that overrides it.
std::string name_of(const KnobInfo& knob) {
  if (knob.knob == Knob::transport) return fmt::format("{} (or InitOptions::transport)", knob.name);
  if (knob.knob == Knob::algorithm) return fmt::format("{} (or InitOptions::algorithm)", knob.name);
  return knob.name;
}

std::string value_of(const Settings& settings, const std::string& name) {
  for (const Setting& setting : settings) {
    if (setting.name == name) return setting.value.empty() ? "not set" : setting.value;
  }
  return "unknown";
}

// "rank 3 (pid 4711 on node7)", "ranks 0-2 (node1, node2)"
std::string describe(const std::vector<SettingsOf>& all, const std::vector<int>& ranks) {
  const auto of = [&](int rank) -> const SettingsOf& { return all[rank]; };
  if (ranks.size() == 1) return of(ranks.front()).description;
  std::vector<std::string> hosts;
  for (const int rank : ranks) {
    if (std::find(hosts.begin(), hosts.end(), of(rank).host) == hosts.end()) hosts.push_back(of(rank).host);
  }
  const std::size_t named = std::min(hosts.size(), kMostHosts);
  const std::string more = hosts.size() > named ? fmt::format(" and {} more", hosts.size() - named) : "";
  hosts.resize(named);
  return fmt::format("ranks {} ({}{})", list_ranks(ranks), fmt::join(hosts, ", "), more);
}

std::string difference_in(const std::vector<SettingsOf>& all, const std::string& name) {
  std::vector<std::pair<std::string, std::vector<int>>> values;  // in the order of their first ranks
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string value = value_of(all[r].settings, name);
    auto it = std::find_if(values.begin(), values.end(), [&](const auto& entry) { return entry.first == value; });
    if (it == values.end()) it = values.insert(values.end(), {value, {}});
    it->second.push_back(static_cast<int>(r));
  }
  if (values.size() < 2) return {};
  std::string text = name + " is ";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += fmt::format("{}{} on {}", i == 0 ? "" : " but ", shown(values[i].first), describe(all, values[i].second));
  }
  return text + "; it must be alike on all ranks";
}

}  // namespace

Settings settings_of_this_rank(const ChosenSettings& chosen) {
  Settings settings = {{kVersion, version()},
                       {"the byte order", std::endian::native == std::endian::little ? "little" : "big"},
                       {"InitOptions::backend", chosen.backend}};
  for (const KnobInfo& knob : knobs()) {
    if (knob.scope != Scope::world) continue;
    const auto it = chosen.knobs.find(knob.knob);
    const std::string value = it != chosen.knobs.end() ? it->second : knob_text(knob.knob);
    settings.push_back({name_of(knob), canonical_text(knob, value)});
  }
  return settings;
}

bool of_this_version(const Settings& settings) noexcept {
  return !settings.empty() && settings.front().name == kVersion && settings.front().value == version();
}

std::string difference(const std::vector<SettingsOf>& ranks) {
  if (ranks.empty()) return {};
  // Other versions have different settings and formats, so report the version alone.
  if (std::string versions = difference_in(ranks, kVersion); !versions.empty()) return versions;
  std::vector<std::string> differences;
  for (const Setting& setting : ranks.front().settings) {
    if (std::string text = difference_in(ranks, setting.name); !text.empty()) differences.push_back(std::move(text));
  }
  return fmt::format("{}", fmt::join(differences, ". "));
}

}  // namespace maniple
