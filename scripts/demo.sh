#!/usr/bin/env bash
# From a fresh Debian machine to the main job: installs what is missing, builds, and runs four ranks.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "demo: building"
cmake --preset release --log-level=WARNING
cmake --build --preset release --target examples

echo
echo "demo: four ranks say hello"
scripts/ranks.sh 4 build/bin/examples/01_hello
echo
echo "demo: four ranks, every collective"
scripts/ranks.sh 4 build/bin/examples/02_collectives
