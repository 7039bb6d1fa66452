#!/usr/bin/env bash
# The commands that README.md and docs/ show. Usage: commands.sh MANIPLE [ROOT]
# 1. `maniple SUBCOMMAND --option ...`, in a block or between backquotes: the subcommand exists and its --help names
#    each option.
# 2. scripts/NAME.sh and build/bin/examples/NAME are there (as a source of that name).
# 3. A variable MANIPLE_... is one that the sources name.
set -euo pipefail
maniple=$(realpath "${1:?the program maniple}")
cd "${2:-$(dirname "$0")/../..}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
documents=(README.md docs/*.md bench/*.md)

# Lines "FILE:LINE COMMAND": what follows `maniple ` in code, up to a comment, a pipe or the user's own program.
commands() {
  awk '
    function show(code) {
      sub(/^ *\$ /, "", code)
      sub(/^ *([A-Z_]+=[^ ]* +)*(build\/bin\/)?/, "", code)
      if (code !~ /^maniple [a-z-]/) return
      sub(/^maniple /, "", code)
      sub(/( #|\\?\||>| \.\.\.| (\.|build\/bin)?\/| [A-Za-z_0-9]+\.py).*/, "", code)
      print FILENAME ":" FNR, code
    }
    FNR == 1 { fenced = 0 }
    /^ *```/ { fenced = !fenced; next }
    fenced || /^    / { show($0); next }
    {
      line = $0
      while (match(line, /`[^`]+`/)) {
        show(substr(line, RSTART + 1, RLENGTH - 2))
        line = substr(line, RSTART + RLENGTH)
      }
    }' "${documents[@]}"
}

violations=$(
  while read -r place subcommand options; do
    help=$work/$subcommand
    if [[ $subcommand == -* ]]; then continue; fi
    [[ -f $help ]] || "$maniple" "$subcommand" --help >"$help" 2>/dev/null || true
    if [[ ! -s $help ]]; then
      echo "$place: there is no \`maniple $subcommand\`"
      continue
    fi
    for option in $options; do
      option=${option%%=*}
      [[ $option =~ ^(--[a-z][a-z-]*|-[a-z])$ ]] || continue
      grep -qE -- "(^|[ ,])$option([ ,=]|\$)" "$help" || echo "$place: \`maniple $subcommand\` has no option $option"
    done
  done < <(commands)
  while IFS=: read -r file line path; do
    case $path in
      scripts/*) [[ -x $path ]] || echo "$file:$line: there is no $path" ;;
      *) [[ -f ${path#build/bin/}.cpp ]] || echo "$file:$line: there is no example ${path#build/bin/}" ;;
    esac
  done < <(grep -HnoE 'scripts/[a-z_]+\.sh|build/bin/examples/[a-z0-9_/]+' "${documents[@]}")
  grep -rhoE 'MANIPLE_[A-Z0-9_]*[A-Z0-9]' src plugins tools include tests bench cmake python CMakeLists.txt CMakePresets.json | sort -u >"$work/variables"
  while IFS=: read -r file line variable; do
    grep -qxF "$variable" "$work/variables" || echo "$file:$line: nothing in the sources is called $variable"
  done < <(grep -HnoE 'MANIPLE_[A-Z0-9_]*[A-Z0-9]' "${documents[@]}")
)
if [[ -n $violations ]]; then
  printf '%s\n' "$violations"
  exit 1
fi
echo "commands: $(commands | wc -l) of maniple, all of which it understands"
