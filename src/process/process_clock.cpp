#include "process/process_clock.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <charconv>

#include <fmt/format.h>

#include "base/unique_fd.h"

namespace maniple::launch {
namespace {

constexpr int kStateField = 3;
constexpr int kStartField = 22;

// The n-th field, counted from 1; the second one, the name, ends at the last ')'.
std::optional<std::string_view> field_of(std::string_view line, int wanted) {
  const auto name_end = line.rfind(')');
  if (name_end == std::string_view::npos) return std::nullopt;
  line.remove_prefix(name_end + 1);
  for (int field = 3;; ++field) {
    const auto begin = line.find_first_not_of(" \n");
    if (begin == std::string_view::npos) return std::nullopt;
    line.remove_prefix(begin);
    const auto end = std::min(line.find_first_of(" \n"), line.size());
    if (field == wanted) return line.substr(0, end);
    line.remove_prefix(end);
  }
}

}  // namespace

std::optional<std::uint64_t> start_in_stat(std::string_view line) {
  const auto state = field_of(line, kStateField);
  const auto text = field_of(line, kStartField);
  if (!state || !text || *state == "Z" || *state == "X") return std::nullopt;
  std::uint64_t ticks = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), ticks);
  if (error != std::errc() || end != text->data() + text->size()) return std::nullopt;
  return ticks;
}

std::optional<std::uint64_t> start_of_process(pid_t pid) {
  const UniqueFd file(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::array<char, 2048> text;
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  if (got <= 0) return std::nullopt;
  return start_in_stat({text.data(), static_cast<std::size_t>(got)});
}

std::string own_pid_space() {
  std::array<char, 64> text;
  const ssize_t got = ::readlink("/proc/self/ns/pid", text.data(), text.size());
  return got > 0 ? std::string(text.data(), static_cast<std::size_t>(got)) : std::string();
}

}  // namespace maniple::launch
