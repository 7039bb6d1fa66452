// Small files of the kernel, names in directories, programs and libraries: where the checks find their facts.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace maniple::doctor {

/// The first 4 KiB, without the line break at the end; nullopt when it cannot be read.
std::optional<std::string> read_small_file(const std::string& path);

std::vector<std::string> names_in(const std::string& directory);

/// Where the way through links ends; empty when it leads nowhere.
std::string real_path(const std::string& path);

std::vector<std::string> split(std::string_view text, char at);

/// Where the dynamic linker looks, in its order.
std::vector<std::string> library_directories();

/// The file that a library's name leads to; empty when there is none.
std::string find_library(const std::string& name);

std::string find_program(const std::string& name);

}  // namespace maniple::doctor
