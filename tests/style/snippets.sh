#!/usr/bin/env bash
# Compiles every ```cpp block of README.md and docs/. A block with a main() is a file of its own; others become functions
# with a group called `world` in scope. Usage: snippets.sh COMPILER [ROOT]
set -euo pipefail
compiler=${1:?the C++ compiler}
cd "${2:-$(dirname "$0")/../..}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

awk -v work="$work" '
  /^```cpp/ { inside = 1; text = ""; start = FNR + 1; next }
  /^```/ && inside {
    inside = 0
    file = FILENAME
    gsub(/[^A-Za-z0-9]/, "_", file)
    path = work "/" file ".cpp"
    if (text ~ /int main\(/) {
      path = work "/" file "_" start ".cpp"
    } else {
      if (!(path in opened)) {
        printf "#include <maniple/comm.h>\n#include <cstdio>\n#include <vector>\nusing namespace maniple;\n" > path
        opened[path] = 1
      }
      text = "void line_" start "([[maybe_unused]] std::shared_ptr<ProcessGroup> world) {\n" \
             "#line " start " \"" FILENAME "\"\n" text "}\n"
    }
    printf "%s", text > path
    ++count
  }
  inside { text = text $0 "\n" }
  END { print count + 0 " snippets" }' README.md docs/*.md

for file in "$work"/*.cpp; do
  "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-unused-variable -Iinclude "$file"
done
