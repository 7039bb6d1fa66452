#!/usr/bin/env bash
# Every public header compiles alone, and twice in a row. Usage: headers.sh COMPILER ROOT [FLAGS OF LIBTORCH]
#
# Those that need LibTorch are compiled if its flags are given. A compiler that comes to the end of a file makes the
# templates that LibTorch's headers mention, which takes it seconds, for each header: so an error that it cannot pass
# stands at the end, and a header is well when this error is the only one.
set -euo pipefail
compiler=${1:?the C++ compiler}
cd "${2:?the root of the sources}/include"
torch_flags=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

end="every line before this one is well"
flags=(-std=c++20 -fsyntax-only -Wfatal-errors -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wcast-qual -Wpedantic -Werror -I.)
count=0 left_out=0 failed=0
while read -r header; do
  more=""
  if [[ $header =~ ^maniple/(train/|dist\.h|maniple\.h) ]]; then
    if [[ -z $torch_flags ]]; then
      left_out=$((left_out + 1))
      continue
    fi
    more=$torch_flags
  fi
  {
    printf '#include <%s>\n#include <%s>  // again\n' "$header" "$header"
    echo "namespace at_the_end {}  // no brace is open any more"
    echo "using namespace ::at_the_end;"
    echo "static_assert(false, \"$end\");"
  } >"$work/header.cpp"
  # shellcheck disable=SC2086  # several flags
  "$compiler" "${flags[@]}" $more "$work/header.cpp" >"$work/said" 2>&1 || true
  if [[ $(grep -c 'error: ' "$work/said") != 1 ]] || ! grep -q "error: .*$end" "$work/said"; then
    echo "$header does not compile alone:"
    cat "$work/said"
    failed=1
  fi
  count=$((count + 1))
done < <(find . -name '*.h' -printf '%P\n' | sort)
echo "$count headers; $left_out on LibTorch are left out, as its flags were not given"
((count > 0 && failed == 0))
