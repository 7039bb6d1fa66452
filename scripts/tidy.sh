#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy. Usage: scripts/tidy.sh BUILD_FOLDER [SOURCE...]
#
# BUILD_FOLDER holds compile_commands.json. Without sources: those that every rank runs, from src/base to src/group, which takes two cores
# about two minutes; those that include LibTorch would take ten times as long, and plugins need the libraries of others. Exit code 77: this
# version is not installed.
set -euo pipefail
program=clang-tidy-19  # on Debian 12 and 13 alike; scripts/setup.sh installs it
build=$(cd "${1:?the build folder}" && pwd)
shift
cd "$(dirname "$0")/.."
if ! command -v "$program" >/dev/null; then
  echo "tidy: $program is not installed (Debian: apt-get install $program)" >&2
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Files that are compiled in groups (MANIPLE_UNITY) are taken one by one here. Clang can read neither GCC's precompiled headers nor some of
# its options.
python3 - "$build/compile_commands.json" >"$work/compile_commands.json" <<'EOF'
import json, re, sys
unread = r'-Winvalid-pch|-include [^ ]*cmake_pch\.hxx|-Wno-(subobject-linkage|restrict|array-bounds|stringop-overflow|stringop-overread)|-Werror'
commands = []
for entry in json.load(open(sys.argv[1])):
    entry["command"] = re.sub(unread, "", entry["command"])
    group = entry["file"]
    files = re.findall(r'^#include "(/.*)"$', open(group).read(), re.M) if "/Unity/" in group else [group]
    commands += [dict(entry, file=file, command=entry["command"].replace(group, file)) for file in files]
json.dump(commands, sys.stdout)
EOF

sources=("$@")
if ((${#sources[@]} == 0)); then
  # Only what this build compiles: some files are for the other processor architecture.
  while read -r source; do
    if grep -qF "/$source\"" "$work/compile_commands.json"; then sources+=("$source"); fi
  done < <(find src/{base,net,shm,store,rendezvous,call,transport,session,collective,backend,group} -name '*.cpp' \
    -not -path 'src/backend/plugin/*/*' | sort)
fi
printf '%s\0' "${sources[@]}" | xargs -0 -P "$(nproc)" -n 4 "$program" -p "$work" --quiet >"$work/said" 2>"$work/counts" || {
  cat "$work/said" "$work/counts"
  exit 1
}
echo "tidy: ${#sources[@]} sources, nothing to report"
