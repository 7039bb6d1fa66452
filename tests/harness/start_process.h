// Starting this program again as a rank of the current test.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace maniple::harness {

/// The child leads its own process group and inherits `channel` besides the standard descriptors. To be called from the
/// main thread, because the child ends when the thread that started it ends.
pid_t start_this_test_again(const std::vector<std::pair<std::string, std::string>>& env, int channel);

/// This program and what makes it run the current test alone.
std::vector<std::string> this_test_again();

/// Any program, found by PATH, in a process group of its own. `channel` -1: nothing is inherited.
pid_t start_program(std::vector<std::string> arguments, const std::vector<std::pair<std::string, std::string>>& env,
                    int channel);

/// A secret of the job for MANIPLE_SECRET_FILE: 64 hexadecimal digits, mode 0600.
void write_secret(const std::string& path);

/// A port below the range from which the kernel takes ports by itself, so nobody gets it by chance.
std::uint16_t free_loopback_port();

}  // namespace maniple::harness
