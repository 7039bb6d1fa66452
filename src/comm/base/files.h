// The few things we do with files and directories, on POSIX alone.
//
// Not std::filesystem: LibTorch 2.x exports symbols of an older copy of it, which a program that links both may get
// instead of its own, and then crashes. A style rule keeps it out of everything that can be linked beside LibTorch.
#pragma once

#include <string>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// Names of what a directory holds, without "." and "..", in no order; empty when it cannot be read.
std::vector<std::string> names_in(const std::string& directory);

/// Where a symbolic link leads; empty when it is none or is gone.
std::string link_target(const std::string& path);

/// The whole file; empty when it cannot be read. For small ones: /proc, say.
std::string file_text(const std::string& path);

/// Everything in a directory and below it, directories before what they hold. Links are not followed.
std::vector<std::string> paths_below(const std::string& directory);

/// Removes a directory and all it holds; what cannot be removed stays.
void remove_tree(const std::string& directory) noexcept;

/// $TMPDIR, or /tmp.
std::string temporary_folder();

}  // namespace maniple
