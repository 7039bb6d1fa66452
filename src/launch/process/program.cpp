#include "launch/process/program.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"

namespace maniple::launch {
namespace {

enum class Found { no, unreadable, directory, not_executable, yes };

Found look_at(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) return errno == EACCES ? Found::unreadable : Found::no;
  if (S_ISDIR(status.st_mode)) return Found::directory;
  // Like execve, access(2) lets root execute exactly the files that any user may execute.
  return ::access(path.c_str(), X_OK) == 0 ? Found::yes : Found::not_executable;
}

/// The first executable with that name, or else the first file with that name.
std::optional<std::string> on_path(const std::string& name, const std::string& search_path, Found& found) {
  std::optional<std::string> second_best;
  for (std::size_t begin = 0; begin <= search_path.size();) {
    const auto end = std::min(search_path.find(':', begin), search_path.size());
    const std::string folder = search_path.substr(begin, end - begin);
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    begin = end + 1;
    const Found here = look_at(path);
    if (here == Found::yes) {
      found = here;
      return path;
    }
    if (here == Found::not_executable && !second_best) second_best = path;
  }
  found = second_best ? Found::not_executable : Found::no;
  return second_best;
}

/// The first bytes of the file, enough to determine its type.
std::string beginning_of(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::string text(256, '\0');
  const ssize_t got = file ? ::read(file.get(), text.data(), text.size()) : 0;
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

}  // namespace

bool is_for_shell(const std::string& path) {
  const std::string text = beginning_of(path);
  return !text.empty() && text.find('\0') == std::string::npos;
}

std::string exec_error_text(const std::string& path, int code) {
  if (code == ENOEXEC) return "it is not a program for this machine, or only a part of one (Exec format error)";
  if (code != ENOENT || ::access(path.c_str(), F_OK) != 0) return start_error_text(code);
  const std::string text = beginning_of(path);
  if (!text.starts_with("#!")) return "the loader or interpreter that it names is not there (see `file` and `ldd`)";
  const auto begin = std::min(text.find_first_not_of(" \t", 2), text.size());
  const auto end = std::min(text.find_first_of(" \t\r\n", begin), text.size());
  return fmt::format("its interpreter {}, named in its first line, is not there{}", text.substr(begin, end - begin),
                     end < text.size() && text[end] == '\r' ? " (the line ends in CR LF, as on Windows)" : "");
}

Program find_program(const std::vector<std::string>& command, const std::string& search_path) {
  MANIPLE_REQUIRE(!command.empty() && !command.front().empty(),
                  "no program given; expected: maniple run [options] PROGRAM [arguments]");
  const std::string& name = command.front();
  std::string path = name;
  Found found = Found::no;
  const bool script = name.ends_with(".py");
  if (name.find('/') != std::string::npos || (script && look_at(name) == Found::not_executable)) {
    found = look_at(name);
  } else if (const auto there = on_path(name, search_path, found)) {
    path = *there;
  }
  if (script && found == Found::not_executable) {
    Found python = Found::no;
    const auto interpreter = on_path("python3", search_path, python);
    if (python != Found::yes)
      throw ProgramError(fmt::format("{} needs python3, which is not on PATH", name), kNotFound);
    Program program{.path = *interpreter, .argv = command};
    program.argv.insert(program.argv.begin(), "python3");
    return program;
  }
  switch (found) {
    case Found::no:
      throw ProgramError(
          fmt::format("program \"{}\" was not found{}", name,
                      name.find('/') == std::string::npos ? " on PATH (a program of this folder: ./" + name + ")" : ""),
          kNotFound);
    case Found::unreadable: throw ProgramError(fmt::format("program \"{}\": permission denied", name), kNotExecutable);
    case Found::directory: throw ProgramError(fmt::format("program \"{}\" is a folder", name), kNotExecutable);
    case Found::not_executable:
      throw ProgramError(fmt::format("program \"{}\" is not executable (chmod +x {})", name, path), kNotExecutable);
    case Found::yes: break;
  }
  return {.path = path, .argv = command};
}

}  // namespace maniple::launch
