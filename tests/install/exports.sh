#!/usr/bin/env bash
# Shared libraries export names of namespace maniple that public headers declare, and of the internal headers that are
# marked for libmaniple_train.so; besides these, what `others` lists. Usage: exports.sh ROOT LIBRARY...
set -euo pipefail
root=${1:?the source tree}
shift
others="$(grep -ohE '\bmaniple_[a-z_]+\(' "$root/include/maniple/c.h" | tr -d '(' | sort -u | tr '\n' ' ')"  # in C

declared() { grep -rl '^namespace MANIPLE_API' --include='*.h' "$@" | xargs grep -ohE '[A-Za-z_][A-Za-z0-9_]*' | sort -u; }
violations=$(
  for library in "$@"; do
    nm -D --defined-only "$library" | awk -v library="$(basename "$library")" '{ print library, $NF }'
  done | awk -v others="$others" -v words="$(declared "$root/include" "$root/src")" '
    BEGIN {
      n = split(words, list, "\n"); for (i = 1; i <= n; ++i) is_declared[list[i]] = 1
      n = split(others, list, " "); for (i = 1; i <= n; ++i) is_allowed[list[i]] = 1
    }
    # The next name of a mangled one, "5Error...", or "" where something else follows: an operator, a constructor.
    function next_name(    length_of_name, name) {
      if (!match(rest, /^[0-9]+/)) return ""
      length_of_name = substr(rest, 1, RLENGTH) + 0
      name = substr(rest, RLENGTH + 1, length_of_name)
      rest = substr(rest, RLENGTH + 1 + length_of_name)
      return name
    }
    {
      if ($2 in is_allowed) next
      rest = $2
      # Of an object or function, perhaps static in a function; of its guard; of vtable, typeinfo or thunk.
      if (!sub(/^_Z(GV|T[A-Z]|T[hvc][n0-9_]*)?Z?N[KOR]*7maniple/, "", rest)) { print; next }
      name = next_name()
      while (name == "detail" || name == "launch" || name == "nn") name = next_name()
      if (name != "" && !(name in is_declared)) print
    }')
if [[ -n $violations ]]; then
  echo "exported, but declared by no header that is marked with MANIPLE_API:"
  c++filt <<<"$violations"
  exit 1
fi

# Errors are caught by their class on the other side of a library's border, so its typeinfo must be exported.
first=$(nm -D --defined-only "$1")
for class in $(sed -nE 's/^(struct|class) ([A-Z][A-Za-z]+)( final)? : .*Error \{$/\2/p' "$root/include/maniple/comm/error.h") Error; do
  grep -q " _ZTIN7maniple${#class}${class}E\$" <<<"$first" || { echo "$1 does not export the typeinfo of $class"; exit 1; }
done
echo "exports: $(nm -D --defined-only "$@" | grep -c ' [A-Za-z] ') names, nothing to complain about"
