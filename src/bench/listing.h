// What `maniple bench --list` prints.
#pragma once

#include <string>

#include "bench/system.h"

namespace maniple::bench {

std::string listing(const Site& site);

}  // namespace maniple::bench
