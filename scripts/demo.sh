#!/usr/bin/env bash
# From a fresh Debian machine to the main job: installs what is missing, builds, and runs a few ranks.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "demo: building"
cmake --preset release --log-level=WARNING
cmake --build --preset release --target examples

# show RANKS EXAMPLE TITLE
show() {
  printf '\n==== %s\n' "$3"
  scripts/ranks.sh "$1" "build/bin/examples/$2"
}
show 4 01_hello "four ranks say hello"
show 4 02_collectives "every collective: what each rank held before -> and after"
show 2 04_registered_memory "memory that all ranks map is summed where it lies"
show 3 06_lost_rank "a rank dies, the others say so and what they did last"

printf '\n==== go on with\n'
echo "  README.md, a program of 20 lines"
echo "  scripts/ranks.sh 2 build/bin/examples/03_overlap"
echo "  cmake --build --preset release && build/bin/maniple bench all_reduce --ranks 2"
