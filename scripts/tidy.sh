#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy. Usage: scripts/tidy.sh BUILD_FOLDER [SOURCE...]
#
# BUILD_FOLDER holds compile_commands.json. Without sources, checks the sources of maniple_comm, which every rank runs:
# sources that include LibTorch would take ten times as long, and plugins need third-party libraries. Exit code 77: this
# version is not installed.
set -euo pipefail
program=clang-tidy-19  # available on Debian 12 and 13; scripts/setup.sh installs it
build=$(cd "${1:?the build folder}" && pwd)
shift
cd "$(dirname "$0")/.."
if ! command -v "$program" >/dev/null; then
  echo "tidy: $program is not installed (Debian: apt-get install $program)" >&2
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Checks files that are compiled in groups (MANIPLE_UNITY) in groups, too, which takes a third of the time, and checks
# named files one by one. Clang can read neither GCC's precompiled headers nor some GCC options.
python3 - "$build/compile_commands.json" "$work" <<'EOF'
import json, re, sys
unread = r'-Winvalid-pch|-include [^ ]*cmake_pch\.hxx|-Wno-(subobject-linkage|restrict|array-bounds|stringop-overflow|stringop-overread)|-Werror'
commands, all_ranks_run = [], []
for entry in json.load(open(sys.argv[1])):
    entry["command"] = re.sub(unread, "", entry["command"])
    group = entry["file"]
    files = re.findall(r'^#include "(/.*)"$', open(group).read(), re.M) if "/Unity/" in group else []
    commands += [entry] + [dict(entry, file=file, command=entry["command"].replace(group, file)) for file in files]
    if "maniple_comm.dir/" in entry["command"] and "cmake_pch" not in group: all_ranks_run.append(group)
json.dump(commands, open(sys.argv[2] + "/compile_commands.json", "w"))
open(sys.argv[2] + "/sources", "w").write("\n".join(all_ranks_run) + "\n")
EOF

sources=("$@")
((${#sources[@]} != 0)) || mapfile -t sources <"$work/sources"
printf '%s\0' "${sources[@]}" | xargs -0 -P "$(nproc)" -n 2 "$program" -p "$work" --quiet >"$work/said" 2>"$work/counts" || {
  cat "$work/said" "$work/counts"
  exit 1
}
echo "tidy: nothing to report in ${#sources[@]} files or groups of files"
