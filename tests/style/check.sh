#!/usr/bin/env bash
# House rules that no compiler checks. Usage: check.sh RULE [ROOT]
# Prints each violation as file:line: what, and fails if there is one.
set -euo pipefail
rules="layers torch filesystem names classes exports lengths columns sleeps locks mutexes errors knobs variables words prose"
rule=${1:?one of $rules}
here=$(cd "$(dirname "$0")" && pwd)
cd "${2:-$here/../..}"

# The layers, lowest first: a folder of src/, plugins/ or tools/ may include itself and the folders before it.
layers="comm/base comm/net comm/shm comm/store comm/rendezvous comm/call comm/transport comm/session comm/collective comm/backend plugins
  comm/group comm/capi launch/process launch/jobs launch launch/spawn tools/doctor train/tensor train tools/bench tools/cli"

# The only folders that may include LibTorch.
torch_folders="src/train/ include/maniple/train/ include/maniple/dist.h include/maniple/maniple.h tests/train/ tests/style/ examples/ bench/ddp_worker.cpp bench/ddp_gpu_worker.cpp bench/optim_worker.cpp bench/train_worker.cpp bench/sharded_worker.cpp bench/elastic_worker.cpp bench/elastic_faults_worker.cpp bench/elastic_models.h"

forbidden_names="manager helper utils common misc"
longest_file=450
longest_line=120

# Sources of the given folders, those that exist.
sources() {
  local folders=()
  for folder in "$@"; do [[ -d $folder ]] && folders+=("$folder"); done
  ((${#folders[@]} == 0)) || find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.inl' \) | sort
}

check_layers() {
  sources src plugins tools | xargs -r awk -v layers="$layers" '
    # The innermost folder of a path that has a place in the table.
    function layer_of(path) {
      while (sub(/\/[^\/]*$/, "", path)) if (path in place) return path
      return ""
    }
    BEGIN {
      n = split(layers, list, " ")
      for (i = 1; i <= n; ++i) place[list[i]] = i
    }
    FNR == 1 {
      file = FILENAME
      sub(/^src\//, "", file)
      own = layer_of(file)
      if (own == "") print FILENAME ":1: its folder has no place in the table of layers (tests/style/check.sh)"
    }
    /^[ \t]*#[ \t]*include[ \t]*"/ {
      split($0, quoted, "\"")
      other = layer_of(quoted[2])
      if (other == "")
        print FILENAME ":" FNR ": \"" quoted[2] "\" is not of the form \"layer/file.h\""
      else if (place[other] > place[own])
        print FILENAME ":" FNR ": " own " includes \"" quoted[2] "\", but " other " lies above it"
    }'
  # The table of folders in the manual is this list.
  [[ ! -f docs/architecture.md ]] ||
    [[ $(sed -nE 's/^\| `(src\/)?((comm|launch|train|plugins|tools)(\/[a-z]+)?)\/` \|.*/\2/p' docs/architecture.md | xargs) == "$(xargs <<<"$layers")" ]] ||
    echo "docs/architecture.md:1: its table of folders is not the list of layers in tests/style/check.sh"
  # What users include must not lead into src/.
  sources include | xargs -r awk '/^[ \t]*#[ \t]*include[ \t]*"/ {
    print FILENAME ":" FNR ": a public header includes public headers only, as <maniple/...>" }'
}

check_torch() {
  sources src plugins tools include tests bench examples |
    xargs -r awk -v folders="$torch_folders" '
      BEGIN { n = split(folders, list, " ") }
      FNR == 1 {
        allowed = 0
        for (i = 1; i <= n; ++i) if (index(FILENAME, list[i]) == 1) allowed = 1
      }
      !allowed && /^[ \t]*#[ \t]*include[ \t]*[<"](torch|ATen|c10)\// {
        print FILENAME ":" FNR ": LibTorch is included outside src/train" }
      allowed && /^[ \t]*#[ \t]*include[ \t]*[<"]fmt\// {
        print FILENAME ":" FNR ": LibTorch brings a fmt of its own; use comm/base/format.h" }'
  sources src plugins tools | xargs -r awk '
    FNR == 1 { has_ranges = 0 }
    /#[ \t]*include[ \t]*<fmt\/ranges.h>/ { has_ranges = 1 }
    /fmt::join\(/ && !has_ranges { print FILENAME ":" FNR ": fmt::join is in <fmt/ranges.h> since fmt 11" }'
}

# LibTorch 2.x exports a broken copy of std::filesystem, see src/comm/base/files.h. The `maniple` program never links
# LibTorch.
check_filesystem() {
  sources src plugins include tests bench | { grep -vE '^tests/tools/(cli|bench)/' || true; } |
    xargs -r awk '/std::filesystem|#[ \t]*include[ \t]*<filesystem>/ && !/\/\/.*std::filesystem/ {
      print FILENAME ":" FNR ": std::filesystem crashes in programs with LibTorch 2.x; use comm/base/files.h" }'
}

check_names() {
  local pattern=${forbidden_names// /|}
  find . -path './build*' -prune -o -path ./.git -prune -o -type f -print | sed 's|^\./||' |
    grep -E "(^|/)([^/]*[_-])?($pattern)s?([_.-][^/]*)?(/|$)" |
    sed 's/$/:1: a name that says nothing: name the one thing inside/' || true
}

# Two classes of one name in one namespace are one class to the linker, which takes the members of either. Classes of
# one source file go into an unnamed namespace. (Two in one file are the compiler's affair.)
check_classes() {
  sources src plugins tools include | xargs -r awk '
    FNR == 1 { space = ""; unnamed = 0 }
    /^namespace (MANIPLE_API )?[a-z_:]+ \{/ { space = $(NF - 1) }
    /^namespace \{/ { unnamed = 1 }
    /^}  \/\/ namespace$/ { unnamed = 0 }
    !unnamed && /^(class|struct|union|enum|enum class) [A-Za-z0-9_]+( final)?( :[^:;]*)? \{/ {
      name = space "::" ($1 == "enum" && $2 == "class" ? $3 : $2)
      if (name in first && first[name] != FILENAME)
        print FILENAME ":" FNR ": " name " is defined in " first[name] ", too; give one of them another name or namespace"
      else
        first[name] = FILENAME
    }'
}

# A shared library exports the namespaces that are marked with MANIPLE_API: in public headers, and in the internal
# ones by which libmaniple_train.so uses libmaniple.so.
check_exports() {
  local used
  used=$(sources src/train | xargs -r sed -nE 's/^#include "([^"]+)"$/src\/\1/p' | grep -vE '^src/train/' | sort -u || true)
  { sources src plugins tools; sources include; } | { grep '\.h$' || true; } | xargs -r awk -v used="$used" '
    BEGIN { n = split(used, list, "\n"); for (i = 1; i <= n; ++i) is_used[list[i]] = 1 }
    FNR == 1 { exported = FILENAME ~ /^include/ || FILENAME in is_used }
    /^namespace maniple/ && exported { print FILENAME ":" FNR ": write: namespace MANIPLE_API maniple {" }
    /^namespace MANIPLE_API/ && !exported {
      print FILENAME ":" FNR ": only public headers and those that src/train includes are marked with MANIPLE_API" }'
}

check_lengths() {
  sources src plugins tools include tests bench examples | xargs -r awk -v limit="$longest_file" '
    FNR == 1 && NR > 1 && last > limit { print file ":" last ": longer than " limit " lines; split it" }
    { file = FILENAME; last = FNR }
    END { if (last > limit) print file ":" last ": longer than " limit " lines; split it" }'
}

# Sources end at column 120, and so do prose of pages and comments of scripts. A line that cannot be broken is free: one
# of a table, of code on a page, a link alone.
check_columns() {
  {
    sources src plugins tools include tests bench examples python
    find . -path './build*' -prune -o -path './.?*' -prune -o -type f \( -name '*.md' -o -name '*.sh' -o -name '*.py' -o -name '*.awk' \
      -o -name '*.cmake' -o -name CMakeLists.txt \) -print | sed 's|^\./||' | sort
  } | xargs -r awk -v limit="$longest_line" '
    FNR == 1 { fenced = 0; page = FILENAME ~ /\.md$/; script = FILENAME ~ /\.(sh|py|awk|cmake|txt)$/ }
    page && /^ *```/ { fenced = !fenced }
    { line = $0; gsub(/[\200-\277]/, "", line) }  # characters, not bytes
    length(line) <= limit { next }
    page && (fenced || /^ *[|#!<]/ || /^    / || /^ *`[^`]*`.?$/ || !/[^ ] +[^ ]/) { next }
    script && !/^[ \t]*# / { next }
    { print FILENAME ":" FNR ": longer than " limit " columns" }'
}

# We wait for conditions, never for time to pass. Where there is nothing to wait for (a port that opens elsewhere), or
# the delay itself is the fault, the line or the one before it says so: "// sleep: reason".
check_sleeps() {
  sources src plugins tools tests | xargs -r awk '
    FNR == 1 { before = "" }
    /^[ \t]*\/\// { before = $0; next }
    /(^|[^A-Za-z0-9_])(sleep_for|sleep_until|usleep|nanosleep|clock_nanosleep|sleep)[ \t]*\(/ &&
        !/\/\/ sleep: ./ && before !~ /^[ \t]*\/\/ sleep: ./ {
      print FILENAME ":" FNR ": it sleeps instead of waiting for a condition" }
    { before = $0 }'
}

# A child of fork() finds a lock of static storage as another thread of its parent held it, and would wait for ever.
check_locks() {
  sources src plugins tools | xargs -r awk '
    /^[ \t]*\/\// { next }
    /^(inline |constinit )*(std::([a-z]+_)?(mutex|once_flag)|Mutex) [a-z]/ ||
        /^[ \t]*static (inline |constinit )*(std::([a-z]+_)?(mutex|once_flag)|Mutex) / {
      print FILENAME ":" FNR ": a child of fork() may find it locked; use ProcessWide (comm/base/fork_guard.h) or ForkSafeMutex" }'
}

# A mutex is a Mutex of comm/base/mutex.h, so that Clang checks what it guards. Files in which it is not yet one:
native_mutexes="src/comm/base/mutex.h src/comm/shm/ src/comm/transport/exchange src/comm/transport/message_engine
  src/comm/backend/plugin/load.cpp src/launch/coordinate/coordinator src/launch/output/
  plugins/cuda/driver.cpp src/train/ddp/reducer.h"

check_mutexes() {
  sources src plugins tools | xargs -r awk -v excepted="$native_mutexes" '
    BEGIN { n = split(excepted, list, " ") }
    FNR == 1 {
      checked = 1
      for (i = 1; i <= n; ++i) if (index(FILENAME, list[i]) == 1) checked = 0
    }
    checked && !/^[ \t]*\/\// && /std::mutex([^A-Za-z0-9_]|$)/ {
      print FILENAME ":" FNR ": write Mutex and MANIPLE_GUARDED_BY (comm/base/mutex.h): Clang checks what it guards" }'
}

# Errors are data: what a program does about one depends on the fields of its ErrorInfo, never on its text. Seen are
# searches in what(), in a reason, and in a variable of the same function that was set from them.
check_errors() {
  sources src plugins tools include | xargs -r awk '
    function complain() {
      print FILENAME ":" FNR ": it searches the error text; read a field of ErrorInfo, or add one (maniple/comm/error.h)"
    }
    BEGIN {
      text = "(what\\(\\)|(^|[^A-Za-z0-9_])reason|text_of\\([^()]*\\))"
      search = "\\)?\\.(find|rfind|find_[a-z_]+|starts_with|ends_with|contains|compare)\\("
    }
    FNR == 1 || /^}/ { split("", texts) }
    /^[ \t]*\/\// { next }
    /#[ \t]*include[ \t]*<regex>/ || $0 ~ text search || $0 ~ "(what\\(\\)|reason) *[!=]= *\"" ||
        /(strstr|strcmp|strncmp|memmem|regex_[a-z]+)\([^;]*(what\(\)|reason)/ { complain(); next }
    {
      for (name in texts) if ($0 ~ "(^|[^A-Za-z0-9_.])" name search) { complain(); break }
    }
    match($0, "[A-Za-z_][A-Za-z0-9_]*( = |\\(|\\{)[^;=]*" text "[^A-Za-z0-9_(]") {
      name = substr($0, RSTART)
      sub(/[^A-Za-z0-9_].*/, "", name)
      texts[name] = 1
    }'
}

# The manual's table of knobs is the program's table.
check_knobs() {
  [[ -f src/comm/base/environment.cpp ]] || return 0
  local rows row
  grep -q '{Knob::' src/comm/base/environment.cpp || echo "src/comm/base/environment.cpp:1: no table of knobs"
  rows=$(tr -d '\n' <src/comm/base/environment.cpp |
    { grep -oE '\{Knob::[a-z_]+, *"[^"]*", *"[^"]*", *[a-z_]+\([^()]*\), *"[^"]*"(, *Scope::world)?\}' || true; } |
    sed -E 's/^\{Knob::[a-z_]+, *"([^"]*)", *"([^"]*)", *([a-z_]+)\(([^()]*)\), *"([^"]*)"(, *Scope::world)?\}$/\1\t\2\t\3\t\4\t\5\t\6/' |
    awk -F'\t' '
      function row(permitted) { printf "| `%s` | %s | %s | %s |\n", $1, $2 == "" ? "" : "`" $2 "`", permitted, $5 ($6 == "" ? "" : "; alike on all ranks") }
      { gsub(/"/, "", $4); split($4, a, /, */) }
      $3 == "flag" { row("0 or 1") }
      $3 == "whole" { row(a[1] " to " a[2]) }
      $3 == "whole_or" { row(a[1] " or " a[2] " to " a[3]) }
      $3 == "number" { row("number, " a[1] " to " a[2]) }
      $3 == "number_or" { row("number, " a[1] " or " a[2] " to " a[3]) }
      $3 == "one_of" { row($4) }
      $3 == "text" { row(a[2] == "" ? a[1] : a[1] ", up to " a[2] " bytes") }')
  [[ $(grep -c . <<<"$rows") == $(grep -c '{Knob::' src/comm/base/environment.cpp) ]] ||
    echo "src/comm/base/environment.cpp:1: the table of knobs has a line that this rule cannot read"
  while IFS= read -r row; do
    [[ -z $row ]] || grep -qxF "$row" docs/failure.md || echo "docs/failure.md:1: the table of knobs lacks: $row"
  done <<<"$rows"
}

# A MANIPLE_ variable that is read is a knob or in the table of our other variables; else whoever sets it would be
# warned that it is unknown. Programs: every text that is such a name; tests and scripts, which also make up names:
# what is asked for.
check_variables() {
  local known
  known=$(cat src/comm/base/environment.cpp src/comm/base/own_variables.cpp 2>/dev/null |
    { grep -oE '^ *\{(Knob::[a-z_]+, *)?"MANIPLE_[A-Z0-9_]+"' || true; } | grep -oE 'MANIPLE_[A-Z0-9_]+' || true)
  {
    sources src plugins tools include bench examples | xargs -r grep -HnoP '(?<!starts_with\()"MANIPLE_[A-Z0-9_]+["=]' || true
    sources tests | xargs -r grep -HnoE '((getenv|environment_text|environment_integer)\(|= *)"MANIPLE_[A-Z0-9_]+"' || true
    sources tests | xargs -r grep -HnoE '\$\{?MANIPLE_[A-Z0-9_]+' || true
    for folder in scripts tests bench; do
      [[ ! -d $folder ]] || find "$folder" -path tests/style -prune -o -type f \( -name '*.sh' -o -name '*.py' \) -print
    done | sort | xargs -r grep -HnoE "\\\$\{?MANIPLE_[A-Z0-9_]+|environ(\[|\.get\()[\"']MANIPLE_[A-Z0-9_]+" || true
    find . -path './build*' -prune -o \( -name CMakeLists.txt -o -name '*.cmake' \) -print | sed 's|^\./||' | sort |
      xargs -r grep -HnoE 'ENV\{MANIPLE_[A-Z0-9_]+' || true
  } | sed -E 's/^([^:]+:[0-9]+):.*(MANIPLE_[A-Z0-9_]+).*$/\1 \2/' |
    awk -v known="$known" '
      BEGIN { n = split(known, list, "\n"); for (i = 1; i <= n; ++i) is_known[list[i]] = 1 }
      !($2 in is_known) {
        print $1 ": " $2 " is neither a knob (src/comm/base/environment.cpp) nor in the table of src/comm/base/own_variables.cpp" }'
}

# Private words for things that have a name in the field: the table of words.txt.
check_words() {
  local files word scope instead allowed capital pattern
  mapfile -t files < <(find . -path './build*' -prune -o -path './.?*' -prune -o -path ./tests/style -prune -o -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.md' -o -name '*.sh' -o -name '*.py' -o -name '*.txt' \) -print | sed 's|^\./||' | sort)
  while IFS='#' read -r word scope instead allowed; do
    capital="(${word})"
    if [[ $word == [a-z]* ]]; then capital="($(sed -E 's/(^|\|)([a-z])/\1\u\2/g' <<<"$word"))"; fi
    pattern="$capital([^a-z]|\$)"
    if [[ $word == [a-z]* ]]; then pattern="(^|[^A-Za-z])($word)([^A-Za-z]|\$)|$pattern"; fi
    if [[ $scope == texts ]]; then pattern="\"([^\"]*[^A-Za-z\"])?($word)([^A-Za-z\"][^\"]*)?\""; fi
    printf '%s\n' "${files[@]}" | { [[ $scope == texts ]] && grep -E '\.(h|cpp|inl)$' || cat; } | { grep -vE "${allowed:-^$}" || true; } |
      { xargs -r grep -HnE "$pattern" || true; } | awk -F: -v word="$word" -v instead="$instead" '
        { print $1 ":" $2 ": \"" word "\"; write: " instead }'
  done < <(sed -E '/^(#|$)/d; s/ *\| +(anywhere|texts) *\| */#\1#/; s/ +\| +/#/' "$here/words.txt")
}

# Turns of phrase that readers stumble over, in all that people read: the table of prose.txt.
check_prose() {
  find . -path './build*' -prune -o -path './.?*' -prune -o -path './tests/style/self_test.sh' -prune -o -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.md' -o -name '*.sh' -o -name '*.py' -o -name '*.awk' \
    -o -name '*.cmake' -o -name CMakeLists.txt \) -print | sed 's|^\./||' | sort | xargs -r perl "$here/prose.pl" "$here/prose.txt"
}

violations=$("check_$rule")
if [[ -n $violations ]]; then
  printf '%s\n' "$violations"
  exit 1
fi
echo "$rule: nothing to complain about"
