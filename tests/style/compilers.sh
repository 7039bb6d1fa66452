#!/usr/bin/env bash
# README.md's table of which compiler goes with which LibTorch, tried with the compilers of this machine on the LibTorch
# of this build. Usage: compilers.sh ROOT LIBTORCH_VERSION FLAGS_OF_LIBTORCH
#
# A row is "| LibTorch 1.13 | ... | compiles with | does not compile with |". A compiler that the row does not name is
# tried, too, and only reported.
set -euo pipefail
root=${1:?the root of the sources} version=${2:?the version of LibTorch} torch_flags=${3?the flags of LibTorch}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

short=$(cut -d. -f1,2 <<<"$version")
row=$(grep -F "| LibTorch $short |" "$root/README.md" || true)
[[ -n $row ]] || { echo "README.md: the table of compilers has no row for LibTorch $short"; exit 1; }
good=$(cut -d'|' -f4 <<<"$row") bad=$(cut -d'|' -f5 <<<"$row")

printf '#include <maniple/maniple.h>\nint main() { maniple::init_process_group(); }\n' >"$work/program.cpp"
failed=0 tried=0
for command in g++ clang++; do
  command -v "$command" >/dev/null || continue
  major=$("$command" -dumpversion | cut -d. -f1)
  name="GCC $major"
  [[ $command != clang++ ]] || name="Clang $major"
  verdict="does not compile"
  # shellcheck disable=SC2086  # several flags
  if "$command" -std=c++20 -fsyntax-only -w -I"$root/include" $torch_flags "$work/program.cpp" >"$work/said" 2>&1; then verdict=compiles; fi
  case ", $(xargs <<<"$good"), " in *", $name, "*) expected=compiles ;; *) expected='' ;; esac
  case ", $(xargs <<<"$bad"), " in *", $name, "*) expected="does not compile" ;; esac
  echo "LibTorch $short, $name: $verdict; the table says: ${expected:-nothing}"
  if [[ -n $expected && $expected != "$verdict" ]]; then
    grep -m 3 error: "$work/said" || true
    failed=1
  fi
  [[ -z $expected ]] || tried=$((tried + 1))
done
((tried > 0)) || { echo "none of the compilers here is in README.md's row for LibTorch $short"; failed=1; }
exit "$failed"
