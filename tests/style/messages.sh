#!/usr/bin/env bash
# docs/troubleshooting.md against the sources. Usage: messages.sh [--all] [ROOT]
# 1. Every message that the page names (between backquotes in the first column of a table; "..." stands for what varies)
#    exists: a text of the sources holds its fixed words in that order.
# 2. Every source file that can throw or warn with words of its own is represented by one of them. With --all: every
#    message.
# Prints each violation as file:line: what, and fails if there is one.
set -euo pipefail
all=0
if [[ ${1:-} == --all ]]; then all=1 && shift; fi
cd "${1:-$(dirname "$0")/../..}"
page=docs/troubleshooting.md

# Programs for developers, whose messages are about their own command line; what only passes on the texts of others.
left_out='^tools/(cli/)?bench|^src/comm/base/log\.'

violations=$(find include plugins src tools -type f \( -name '*.h' -o -name '*.cpp' \) | sort | grep -vE "$left_out" |
  awk -v page="$page" -v all="$all" '
  function holds(text, message,    i, n, at) {
    n = pieces[message]
    for (i = 1; i <= n; ++i) {
      at = index(text, piece[message, i])
      if (at == 0) return 0
      text = substr(text, at + length(piece[message, i]))
    }
    return 1
  }
  # Whether the page names a message with one of the texts in this stretch of code.
  function is_named(code,    text, k, words) {
    longest = ""
    while (match(code, /"([^"\\]|\\.)*"/)) {
      text = substr(code, RSTART + 1, RLENGTH - 2)
      code = substr(code, RSTART + RLENGTH)
      gsub(/\\"/, "\"", text)
      words = text
      gsub(/\{[^}]*\}|[^a-z]/, "", words)
      # "{}: {}" carries the text of another, which is looked at where it is made.
      if (length(words) >= 6 && text ~ /[a-z] [a-z]/ && length(text) > length(longest)) longest = text
      for (k = 1; k <= m; ++k) {
        if (holds(text, k)) { exists[k] = 1; found = 1 }
      }
    }
    return found
  }
  function read_page(    row, cell, count, part, i, n, k, words, list) {
    while ((getline row < page) > 0) {
      ++number
      if (row !~ /^\| `/) continue
      sub(/` \|.*/, "`", row)
      count = split(row, part, "`")
      for (i = 2; i <= count; i += 2) {
        message[++m] = part[i]
        line[m] = number
        n = split(part[i], list, /\.\.\./)
        for (k = 1; k <= n; ++k) {
          words = list[k]
          gsub(/^ +| +$/, "", words)
          if (words != "") piece[m, ++pieces[m]] = words
        }
      }
    }
  }
  BEGIN { read_page() }
  {
    file = $0
    text = ""
    while ((getline row < file) > 0) {
      sub(/^[ \t]*\/\/.*/, "", row)
      text = text row "\n"
    }
    close(file)
    gsub(/"[ \t\n]+"/, "", text)  # a message that is written in several pieces
    found = 0
    is_named(text)
    here = found
    speaks = 0
    while (match(text, /MANIPLE_REQUIRE\(|throw (::)?(maniple::)?[A-Z][A-Za-z]*\(|log_warning\(|[^a-z_](fail|refuse)\(/)) {
      text = substr(text, RSTART + RLENGTH)
      match(text, /^([^";]|"([^"\\]|\\.)*")*/)
      statement = substr(text, 1, RLENGTH)
      found = 0
      if (is_named(statement) || longest == "") continue
      speaks = 1
      if (all) print file ":1: " page " does not name \"" longest "\""
    }
    if (speaks && !here && !all) print file ":1: it can throw or warn, but " page " names none of its messages"
  }
  END {
    for (k = 1; k <= m; ++k) {
      if (!(k in exists)) print page ":" line[k] ": no text of the sources has the words of `" message[k] "`"
    }
    if (m < 100) print page ":1: only " m " messages were found on the page; has its form changed?"
  }')
if [[ -n $violations ]]; then
  printf '%s\n' "$violations"
  exit 1
fi
echo "messages: the page and the sources agree"
