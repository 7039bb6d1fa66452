// `maniple ps` as text: a table that fits the terminal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "jobs/job_record.h"

namespace maniple::launch {

/// `now` in seconds after 1970. The command is shortened so that no line is longer than `width`; 0: lines may be any
/// length.
std::string job_table(const std::vector<JobInfo>& jobs, std::int64_t now, int width);

/// "5s", "3m07s", "2h15m", "4d03h"
std::string elapsed_text(std::int64_t seconds);

/// Without control characters, which could play tricks on a terminal.
std::string printable(const std::string& text);

}  // namespace maniple::launch
