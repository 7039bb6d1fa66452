#!/usr/bin/env bash
# Every link of our pages leads somewhere, without a network. Usage: links.sh [ROOT [SITE]]
# Markdown pages: files and folders exist, and what follows a # is a heading of that page, as GitHub names it; paths of the repository
# between backquotes (`src/net/`, * stands for anything) exist, too. With SITE, a folder of HTML
# that scripts/docs.sh made: files and ids exist there. Addresses of the web are not visited.
set -euo pipefail
cd "${1:-$(dirname "$0")/../..}"
site=${2:-}

pages=()
for page in README.md docs/*.md bench/*.md; do [[ ! -f $page ]] || pages+=("$page"); done
# One line for each heading (page, id), each link and each path (page, line, target). A heading that occurs twice has -1 behind its second id.
markdown() {
  awk '
    FNR == 1 { fenced = 0; split("", seen) }
    /^ *```/ { fenced = !fenced }
    fenced || /^    / { next }
    /^#+ / {
      id = tolower($0)
      sub(/^#+ /, "", id)
      gsub(/[^a-z0-9 _-]/, "", id)
      gsub(/ /, "-", id)
      print "id", FILENAME, (id in seen) ? id "-" seen[id] : id
      ++seen[id]
    }
    {
      line = $0
      while (match(line, /`[^`]*`/)) {
        code = substr(line, RSTART + 1, RLENGTH - 2)
        if (code ~ /^(bench|cmake|docs|examples|include|scripts|src|tests)\/[A-Za-z0-9_.\/*-]+$/) print "path", FILENAME, FNR, code
        line = substr(line, 1, RSTART - 1) substr(line, RSTART + RLENGTH)
      }
      while (match(line, /\]\([^() ]*\)/)) {
        print "link", FILENAME, FNR, substr(line, RSTART + 2, RLENGTH - 3)
        line = substr(line, RSTART + RLENGTH)
      }
    }' "${pages[@]}"
}
markdown_violations() {
  local kind page line target path anchor ids
  ids=$(markdown | awk '$1 == "id" { print $2 "#" $3 }')
  while read -r kind page line target; do
    [[ $kind != path || -e $target ]] || { [[ $target == *\** ]] && compgen -G "$target" >/dev/null; } || echo "$page:$line: there is no $target"
    [[ $kind == link && ! $target =~ ^[a-z]+: ]] || continue
    path=${target%%#*}
    anchor=${target#"$path"}
    if [[ -n $path ]]; then path=$(realpath -m --relative-to=. "$(dirname "$page")/$path"); else path=$page; fi
    if [[ ! -e $path ]]; then
      echo "$page:$line: there is no $path"
    elif [[ $path == ../* ]]; then
      echo "$page:$line: $target lies outside the repository"
    elif [[ -n $anchor ]] && ! grep -qxF "$path$anchor" <<<"$ids"; then
      echo "$page:$line: $path has no heading $anchor"
    fi
  done < <(markdown)
}

# The pages of the site, as a list of ids and a list of links. What Doxygen shows by JavaScript is not seen.
site_violations() {
  (cd "$site" && find . -maxdepth 1 -name '*.html' -printf '%P\n' | sort | xargs awk '
    BEGIN { RS = "<" }
    {
      file = FILENAME
      if (!(file in exists)) exists[file] = 1
      if (match($0, /^[a-z][a-z0-9]*[ \n][^>]*>/) == 0) next
      tag = substr($0, 1, RLENGTH)
      if (match(tag, / (id|name)="[^"]*"/)) { at = substr(tag, RSTART, RLENGTH); gsub(/^[^"]*"|"$/, "", at); id[file "#" at] = 1 }
      # A tag may have both a name and an id.
      if (match(tag, / id="[^"]*"/)) id[file "#" substr(tag, RSTART + 5, RLENGTH - 6)] = 1
      if (match(tag, / (href|src)="[^"]*"/)) {
        target = substr(tag, RSTART, RLENGTH)
        gsub(/^[^"]*"|"$/, "", target)
        # Doxygen announces private nested classes at the top of a page and then leaves them out.
        if (target !~ /#nested-classes$/ && target !~ /^(https?|file|javascript|mailto|data):/) links[file " " target] = 1
      }
    }
    END {
      for (link in links) {
        split(link, part, " ")
        target = part[2]
        at = index(target, "#")
        path = at ? substr(target, 1, at - 1) : target
        anchor = at ? substr(target, at + 1) : ""
        if (path == "") path = part[1]
        if (!(path in exists)) exists[path] = (getline unused < path) >= 0 ? 1 : 0
        if (!exists[path]) print part[1] ": there is no " path
        else if (anchor != "" && path ~ /\.html$/ && !((path "#" anchor) in id)) print part[1] ": " path " has no " anchor
      }
    }' | sort)
}

violations=$(markdown_violations; [[ -z $site ]] || site_violations)
if [[ -n $violations ]]; then
  printf '%s\n' "$violations"
  exit 1
fi
echo "links: all lead somewhere"
