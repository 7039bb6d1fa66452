#!/usr/bin/env bash
# The whole programs of README.md and docs/: ```cpp blocks with a main(). Usage:
#
#   programs.sh extract FOLDER [ROOT]    writes each as FOLDER/NAME.cpp; prints lines "NAME LIBRARY" (comm, launch or
#                                        train)
#   programs.sh run MANIPLE PROGRAM...   runs each as two ranks of `maniple run`, in a folder of its own with a small
#                                        data/mnist; one that starts its ranks itself (library launch) runs as it is
#
# A program has to end with 0 and print nothing to standard error, unless a line "<!-- fails: TEXT -->" stands before
# its block: then it has to end with another status and print TEXT. One with a backend that this build does not have is
# left out.
set -euo pipefail
mode=${1:?extract or run}

extract() {
  local folder=$1 new
  cd "${2:-$(dirname "$0")/../..}"
  new=$(mktemp -d)
  awk -v folder="$new" '
    FNR == 1 { document = FILENAME; gsub(/^.*\/|\.md$/, "", document); count = 0; fails = "" }
    /^```cpp/ { inside = 1; text = ""; start = FNR + 1; next }
    /^```/ && inside {
      inside = 0
      if (text ~ /int main\(/) {
        name = "docs_" document "_" ++count
        library = text ~ /maniple\/maniple\.h/ ? "train" : text ~ /launch\/spawn\.h/ ? "launch" : "comm"
        printf "// library: %s\n// fails: %s\n#line %d \"%s\"\n%s", library, fails, start, FILENAME, text > (folder "/" name ".cpp")
        print name, library
      }
      fails = ""
    }
    inside { text = text $0 "\n"; next }
    /^<!-- fails: .* -->$/ { fails = substr($0, 13, length($0) - 16); next }
    /./ { fails = "" }' README.md docs/*.md
  # What has not changed keeps its time, so that nothing is compiled anew.
  mkdir -p "$folder"
  for file in "$new"/*.cpp; do
    cmp -s "$file" "$folder/$(basename "$file")" || cp "$file" "$folder"
  done
  rm -rf "$new"
}

# An IDX file of zeros: idx KIND COUNT BYTES [ROWS AND COLUMNS]
idx() { printf "\\0\\0\\10\\$1\\0\\0\\1\\0${4:-}" && head -c "$3" /dev/zero; }

run() {
  local maniple=$1 program source fails status backend failed=0 work
  shift
  work=$(mktemp -d)
  trap "rm -rf '$work'" EXIT
  mkdir -p "$work/data/mnist"
  idx 3 256 $((256 * 28 * 28)) '\0\0\0\34\0\0\0\34' >"$work/data/mnist/train-images-idx3-ubyte"
  idx 1 256 256 >"$work/data/mnist/train-labels-idx1-ubyte"
  cd "$work"
  export OMP_NUM_THREADS=1
  MANIPLE_PLUGINS=$(realpath -m "$(dirname "$maniple")/../libexec/maniple") && export MANIPLE_PLUGINS
  for program in "$@"; do
    source=$program.cpp
    fails=$(sed -n 's|^// fails: ||p' "$source")
    backend=$(sed -nE 's/.*\.backend = "([a-z]+)".*/\1/p' "$source")
    if [[ -n $backend ]] && ! grep -qE "^$backend +here" <<<"$("$maniple" backends)"; then
      echo "$(basename "$program"): left out, backend $backend is not here"
      continue
    fi
    local command=("$maniple" run -n 2 "$program")
    if grep -qx '// library: launch' "$source"; then command=("$program"); fi
    status=0
    timeout 60 "${command[@]}" >out 2>err || status=$?
    if [[ -z $fails && $status == 0 && ! -s err ]] || { [[ -n $fails && $status != 0 ]] && grep -qF "$fails" err; }; then
      echo "$(basename "$program"): as it should be"
    else
      echo "$(basename "$program"): exit status $status${fails:+, expected a failure with \"$fails\"}; it printed:"
      cat out err
      failed=1
    fi
  done
  return "$failed"
}

"$mode" "${@:2}"
