#!/usr/bin/env bash
# Every link of our pages, and every file that a page or a comment names, exists; without a network. Usage: links.sh
# [ROOT [SITE]]
# Markdown pages: files and folders exist, and what follows a # is a heading of that page, as GitHub names it; paths of
# the repository between backquotes (`src/comm/net/`, * stands for anything) exist, and so do the parts of qualified
# names there (`Session::on_lost`), in the sources. Comments: a file that one names (arena.h, net/records.h,
# staged_*.cpp) is the end of a path of the repository; names with capitals (NAME.py) and places in programs of users
# (train.cpp:40) are examples. With SITE, a folder of HTML that scripts/docs.sh made: files and ids exist there.
# Addresses of the web are not visited.
set -euo pipefail
cd "${1:-$(dirname "$0")/../..}"
site=${2:-}

# Sources in the given folders, as far as they exist.
sources() {
  local folders=()
  for folder in "$@"; do [[ ! -d $folder ]] || folders+=("$folder"); done
  ((${#folders[@]} == 0)) || find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.inl' \) | sort
}

pages=()
for page in README.md CONTRIBUTING.md SECURITY.md docs/*.md bench/*.md; do [[ ! -f $page ]] || pages+=("$page"); done
# One line for each heading (page, id), each link, each path and each qualified name (page, line, target). A heading
# that occurs twice has -1 behind its second id.
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
        if (code ~ /^(bench|cmake|docs|examples|include|plugins|python|scripts|src|tests|tools)\/[A-Za-z0-9_.\/*-]+$/) print "path", FILENAME, FNR, code
        if (code ~ /^[A-Za-z_]+(::~?[A-Za-z_]+)+(\(\))?$/) { sub(/\(\)$/, "", code); print "name", FILENAME, FNR, code }
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

# Qualified names of the pages.
name_violations() {
  {
    markdown | grep '^name' || true
    sources src plugins tools include tests | xargs -r grep -hoE '[A-Za-z_0-9]+' | sort -u
  } | awk '
    $1 == "name" && NF == 4 { name[++n] = $4; place[n] = $2 ":" $3; next }
    { known[$1] = 1 }
    END {
      for (i = 1; i <= n; ++i) {
        parts = split(name[i], part, /::~?/)
        for (k = 1; k <= parts; ++k) if (!(part[k] in known)) print place[i] ": of " name[i] ", the sources do not have " part[k]
      }
    }'
}

# Files that comments name.
comment_violations() {
  local all
  all=$(find . -path './build*' -prune -o -path './.?*' -prune -o -type f -print | sed 's|^\./||')
  sources src plugins tools include tests bench examples | xargs -r awk -v all="$all" '
    BEGIN {
      n = split(all, path, "\n")
      for (i = 1; i <= n; ++i) {
        m = split(path[i], part, "/")
        end = part[m]
        known[end] = 1
        for (k = m - 1; k > 0; --k) known[end = part[k] "/" end] = 1
      }
    }
    function exists(name, pattern, end) {
      if (name in known) return 1
      if (index(name, "*") == 0) return 0
      pattern = name
      gsub(/\./, "[.]", pattern)
      gsub(/\*/, "[^/]*", pattern)
      for (end in known) if (end ~ "^" pattern "$") return 1
      return 0
    }
    match($0, /(^|[ \t])\/\/.*/) {
      rest = substr($0, RSTART)
      while (match(rest, /[A-Za-z0-9_.*\/-]*[A-Za-z0-9_*]\.(h|cpp|inl|sh|py|cmake|md)/)) {
        name = substr(rest, RSTART, RLENGTH)
        rest = substr(rest, RSTART + RLENGTH)
        sub(/^(\.*\/)+/, "", name)
        if (rest !~ /^[A-Za-z0-9_]/ && rest !~ /^:[0-9]/ && name !~ /[A-Z]/ && !exists(name)) print FILENAME ":" FNR ": there is no " name
      }
    }'
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

violations=$(markdown_violations; name_violations; comment_violations; [[ -z $site ]] || site_violations)
if [[ -n $violations ]]; then
  printf '%s\n' "$violations"
  exit 1
fi
echo "links: all lead somewhere"
