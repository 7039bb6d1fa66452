// File and directory operations on plain POSIX.
//
// std::filesystem is not used because LibTorch 2.x exports symbols of an older copy. A program that links both may bind
// to that copy and crash. A style rule keeps std::filesystem out of everything that can be linked with LibTorch.
#pragma once

#include <string>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The names of a directory's entries, unordered, without "." and ".."; empty when the directory cannot be read.
std::vector<std::string> names_in(const std::string& directory);

/// The target of a symbolic link; empty when `path` is not a link or does not exist.
std::string link_target(const std::string& path);

/// The file's contents; empty when it cannot be read. For small files, as in /proc.
std::string file_text(const std::string& path);

/// All paths below a directory; each directory precedes its contents. Links are not followed.
std::vector<std::string> paths_below(const std::string& directory);

/// Removes a directory and its contents; skips what cannot be removed.
void remove_tree(const std::string& directory) noexcept;

/// $TMPDIR, or /tmp.
std::string temporary_folder();

}  // namespace maniple
