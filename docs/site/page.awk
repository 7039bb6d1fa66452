# Turns a Markdown page as GitHub shows it into one that Doxygen understands: headings get the labels that links use,
# links between pages become references, links to headers lead into the reference, and links to other files of the
# repository become plain text.
function slug(title) {
  title = tolower(title)
  gsub(/[^a-z0-9 _-]/, "", title)
  gsub(/ /, "-", title)
  return title
}
# The label of a page: README.md is the front page, docs/README.md the list of guides.
function label_of(path) {
  if (path == "README.md") return "mainpage"
  if (path == "docs/README.md") return "guides"
  sub(/^docs\//, "", path)
  sub(/\.md$/, "", path)
  return "guide_" path
}
# A path as seen from the page's folder, as seen from the root.
function from_root(path) {
  if (path ~ /^\.\.\//) return substr(path, 4)
  return folder path
}
function link(text, target,    path, anchor, at) {
  if (target ~ /^[a-z]+:/) return "[" text "](" target ")"
  at = index(target, "#")
  path = at ? substr(target, 1, at - 1) : target
  anchor = at ? substr(target, at + 1) : ""
  path = path == "" ? page : from_root(path)
  if (path ~ /\.md$/ && path !~ /^(docs\/)?[A-Za-z_]+\.md$/) return text
  if (path ~ /\.md$/) {
    if (page == "docs/README.md" && anchor == "") return "@subpage " label_of(path) " \"" text "\""
    return "[" text "](@ref " label_of(path) (anchor == "" ? "" : "_" anchor) ")"
  }
  if (path ~ /^include\/.*\.h$/) return "[" text "](@ref " substr(path, 9) ")"
  return text
}
# For text inside <code>. (Replacements with backslashes differ between versions of awk.)
function escaped(code,    done, i, c) {
  done = ""
  for (i = 1; i <= length(code); ++i) {
    c = substr(code, i, 1)
    if (c == "&") c = "&amp;"
    else if (c == "<") c = "&lt;"
    else if (c == "\"") c = "&quot;"
    else if (c == "\\" && substr(code, i + 1, 1) != "|") c = "\\\\"
    done = done c
  }
  return done
}
# Doxygen takes a single quotation mark in code for the beginning of a string that goes on behind it, and shows the
# backslash that a table needs before a vertical bar.
function plain_code(line,    done, code) {
  done = ""
  while (match(line, /`[^`]+`/)) {
    code = substr(line, RSTART + 1, RLENGTH - 2)
    if (gsub(/"/, "\"", code) % 2 == 1 || code ~ /\\\|/) {
      code = "<code>" escaped(code) "</code>"
    } else {
      code = "`" code "`"
    }
    done = done substr(line, 1, RSTART - 1) code
    line = substr(line, RSTART + RLENGTH)
  }
  return done line
}
# Doxygen knows emphasis only in front of letters; ours also begins with code and parentheses.
function emphasis(line, mark, tag,    done, width) {
  done = ""
  width = length(mark)
  while (match(line, mark == "**" ? "[*][*][^*]+[*][*]" : "[*][(][^*]+[*]")) {
    done = done substr(line, 1, RSTART - 1) "<" tag ">" substr(line, RSTART + width, RLENGTH - 2 * width) "</" tag ">"
    line = substr(line, RSTART + RLENGTH)
  }
  return done line
}
FNR == 1 {
  page = FILENAME
  if (index(page, ENVIRON["PWD"] "/") == 1) page = substr(page, length(ENVIRON["PWD"]) + 2)
  folder = page ~ /^docs\// ? "docs/" : ""
}
/^ *```/ { fenced = !fenced }
fenced || /^    / { print; next }
/^#+ / {
  match($0, /^#+/)
  depth = RLENGTH
  title = substr($0, depth + 2)
  label = label_of(page) (depth == 1 ? "" : "_" slug(title))
  gsub(/`/, "", title)
  print substr($0, 1, depth + 1) title " {#" label "}"
  next
}
{
  done = ""
  rest = $0
  while (match(rest, /!?\[[^][]*\]\([^()]*\)/)) {
    done = done substr(rest, 1, RSTART - 1)
    found = substr(rest, RSTART, RLENGTH)
    rest = substr(rest, RSTART + RLENGTH)
    middle = index(found, "](")
    target = substr(found, middle + 2, length(found) - middle - 2)
    if (found ~ /^!/) {
      sub(/^.*\//, "", target)
      done = done substr(found, 1, middle + 1) target ")"
    } else {
      done = done link(substr(found, 2, middle - 2), target)
    }
  }
  print emphasis(emphasis(plain_code(done rest), "**", "b"), "*", "em")
}
