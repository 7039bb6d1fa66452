#!/usr/bin/env bash
# Builds the documentation site (guides from docs/, API reference from the headers) and checks every link.
# Usage: scripts/docs.sh [FOLDER]
# FOLDER defaults to build/site. It must be empty, new, or an earlier site, which is replaced. Needs doxygen (exit code
# 77 without it). Any Doxygen warning is a failure.
set -euo pipefail
case "${1:-}" in
  -*)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    [[ $1 == --help ]] && exit 0 || exit 2
    ;;
esac
folder=$(realpath -m "${1:-$(dirname "$0")/../build/site}")
cd -P "$(dirname "$0")/.."
if [[ -n $(ls -A "$folder" 2>/dev/null) && ! -e $folder/doxygen.css ]]; then
  echo "docs: $folder holds other files; name an empty or a new folder" >&2
  exit 2
fi
if ! command -v doxygen >/dev/null; then
  echo "docs: doxygen is not installed" >&2
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The installed Doxygen's layout, with Maniple's menu names and with descriptions before member lists.
doxygen -l "$work/plain.xml" >/dev/null
sed -e '/<detaileddescription/d' -e 's|<briefdescription .*|<detaileddescription title=""/>|' -e '/type="pages"/s/title=""/title="Guides"/' \
  -e '/type="files"/s/title=""/title="Headers"/' \
  -e '/type="classlist"/s/title=""/title="Classes"/' "$work/plain.xml" >"$work/layout.xml"

version=$(sed -nE 's/^#define MANIPLE_VERSION_STRING "([0-9.]+)".*/\1/p' include/maniple/version.h)
rm -rf "$folder"
mkdir -p "$folder"
{
  cat docs/site/Doxyfile
  echo "OUTPUT_DIRECTORY = \"$folder\""
  echo "LAYOUT_FILE = \"$work/layout.xml\""
  echo "PROJECT_NUMBER = $version"
  echo "WARN_LOGFILE = \"$work/warnings\""
} >"$work/Doxyfile"
doxygen "$work/Doxyfile"
if [[ -s $work/warnings ]]; then
  sed "s|^$PWD/||" "$work/warnings"
  echo "docs: $(wc -l <"$work/warnings") lines of warnings"
  exit 1
fi
tests/style/links.sh . "$folder"
echo "docs: open $folder/index.html"
