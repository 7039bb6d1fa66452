// Starts this program again as a rank of the current test.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace maniple::harness {

/// The child leads its own process group and inherits `channel` in addition to the standard descriptors. Call from the
/// main thread, because the child ends with the thread that started it.
pid_t start_this_test_again(const std::vector<std::pair<std::string, std::string>>& env, int channel);

/// This program and the arguments that make it run only the current test.
std::vector<std::string> this_test_again();

/// Starts any program, found by PATH, in its own process group. `channel` -1: no descriptor is inherited.
pid_t start_program(std::vector<std::string> arguments, const std::vector<std::pair<std::string, std::string>>& env,
                    int channel);

/// Writes a job secret for MANIPLE_SECRET_FILE: 64 hexadecimal digits, mode 0600.
void write_secret(const std::string& path);

/// A port below the kernel's ephemeral range, so that no process gets it by chance.
std::uint16_t free_loopback_port();

}  // namespace maniple::harness
