#!/usr/bin/env bash
# Compiles every ```cpp block of README.md and docs/ that is not a whole program (those are built and run, see
# programs.sh). Usage: snippets.sh COMPILER [ROOT [FLAGS OF LIBTORCH]]
#
# A block becomes a function with a group called `world` in scope. Blocks that need LibTorch (in documents that
# mention torch::) are compiled if its flags are given, all in one translation unit, because its headers take seconds:
# each block is a namespace, its includes go to the top, and functions also see what tests/style/snippet_scope.h
# declares.
set -euo pipefail
compiler=${1:?the C++ compiler}
here=$(cd "$(dirname "$0")" && pwd)
cd "${2:-$here/../..}"
torch_flags=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

documents=(README.md docs/*.md)
awk -v work="$work" -v on_torch=" $(grep -lF 'torch::' "${documents[@]}" | tr '\n' ' ') " '
  /^```cpp/ { inside = 1; text = ""; includes = ""; body = ""; start = FNR + 1; next }
  /^```/ && inside {
    inside = 0
    if (text ~ /int main\(/) next
    ++count
    file = FILENAME
    gsub(/[^A-Za-z0-9]/, "_", file)
    place = "#line " start " \"" FILENAME "\"\n"
    if (index(on_torch, " " FILENAME " ")) {
      ++torch_count
      printf "%s", includes > (work "/torch_includes")
      body = "[[maybe_unused]] inline void function([[maybe_unused]] std::shared_ptr<ProcessGroup> world) {\n" place body "}\n"
      printf "namespace %s_%d {\n%s}\n", file, start, body > (work "/torch_blocks")
      next
    }
    path = work "/" file ".cpp"
    if (!(path in opened)) {
      printf "#include <maniple/comm.h>\n#include <cstdio>\n#include <vector>\nusing namespace maniple;\n" > path
      opened[path] = 1
    }
    printf "void line_%d([[maybe_unused]] std::shared_ptr<ProcessGroup> world) {\n%s%s}\n", start, place, text > path
  }
  inside {
    text = text $0 "\n"
    if ($0 ~ /^#include/) { includes = includes $0 "\n"; body = body "\n" } else { body = body $0 "\n" }
  }
  END { print count + 0 " snippets, " torch_count + 0 " of them on LibTorch" }' "${documents[@]}"

flags=(-std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-unused-variable -Iinclude)
for file in "$work"/*.cpp; do
  [[ ! -f $file ]] || "$compiler" "${flags[@]}" "$file"
done
if [[ -f $work/torch_blocks ]]; then
  if [[ -z $torch_flags ]]; then
    echo "those on LibTorch are left out: its flags were not given"
  else
    # The scope comes first: it may be precompiled.
    cat "$work/torch_includes" "$work/torch_blocks" >"$work/torch.cc"
    # shellcheck disable=SC2086  # several flags
    "$compiler" "${flags[@]}" -Wno-unused-but-set-variable -Wno-unused-function $torch_flags -include "$here/snippet_scope.h" "$work/torch.cc"
  fi
fi
