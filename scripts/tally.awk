# Counts single tests in ctest's output and log, and finds unexpected skips.
#
#   awk -v stage=NAME -v root=1 -f tally.awk tests/expected_skips.txt CTEST_OUTPUT LastTest.log
#
# A skip is expected if tests/expected_skips.txt lists it or, with root=0, if its reason contains "needs root".
#
# A GoogleTest program counts once for each of its tests, any other ctest entry once. Prints one line for each failure
# and each skip, and then "total PASSED FAILED SKIPPED".

FNR == 1 { ++part }

# Part 1: the list of expected skips.
part == 1 && !/^[ \t]*(#|$)/ {
  if ($1 != "*" && $1 != stage) next
  pattern = $2
  gsub(/[][\\.+?(){}|^$]/, "\\\\&", pattern)
  gsub(/\*/, ".*", pattern)
  expected[++expectations] = "^" pattern "$"
}

# Part 2: the verdict on each entry: " 3/10 Test  #3: name ......   Passed    0.02 sec"
part == 2 && /^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
  line = $0
  sub(/^.*Test +#[0-9]+: /, "", line)
  split(line, word, " ")
  state[word[1]] = line ~ /   Passed / ? "passed" : line ~ /\*\*\*Skipped / ? "skipped" : "failed"
  if (!(word[1] in seen)) order[++entries] = word[1]
  seen[word[1]] = 1
}

# Part 3: the output of each entry. Lines with a time are results; at the end lines without a time repeat them.
part == 3 && /^[0-9]+\/[0-9]+ Test: / { entry = $3 }
part == 3 && /\[(       OK |  FAILED  |  SKIPPED )\] [^ ,]+.*\([0-9]+ ms\)$/ {
  verdict = /\[       OK \]/ ? "passed" : /\[  SKIPPED \]/ ? "skipped" : "failed"
  name = $0
  sub(/^.*\[[ A-Z]+\] /, "", name)
  sub(/[ ,].*$/, "", name)
  key = entry SUBSEP name
  # Rank processes may report the same test as their parent process. The worst verdict counts.
  if (!(key in result)) cases[entry] = cases[entry] "\n" name
  if (!(key in result) || verdict == "failed" || (verdict == "skipped" && result[key] == "passed")) {
    result[key] = verdict
    reason[key] = previous
  }
  if (verdict == "failed") has_failure[entry] = 1
}
part == 3 && /\[ RUN      \] / { running[entry] = $NF }
part == 3 { previous = $0 }

function count(verdict, name, why,    i, is_expected) {
  if (verdict == "skipped") {
    is_expected = !root && why ~ /needs root/
    for (i = 1; i <= expectations; ++i) is_expected = is_expected || name ~ expected[i]
    if (is_expected) { ++skipped; print "  skipped, as expected: " name ": " why; return }
    ++failed
    print "  UNEXPECTED SKIP: " name ": " why
  } else if (verdict == "failed") {
    ++failed
    print "  FAILED: " name (why == "" ? "" : " (" why ")")
  } else {
    ++passed
  }
}

END {
  for (e = 1; e <= entries; ++e) {
    entry = order[e]
    n = split(substr(cases[entry], 2), list, "\n")
    for (i = 1; i <= n; ++i) {
      verdict = result[entry, list[i]]
      count(verdict, list[i], verdict == "skipped" ? reason[entry, list[i]] : entry)
    }
    if (n == 0) count(state[entry], entry, state[entry] == "skipped" ? "the whole program" : "")
    else if (state[entry] == "failed" && !has_failure[entry]) count("failed", entry, "ended early, in or after " running[entry])
  }
  print "total " passed + 0 " " failed + 0 " " skipped + 0
}
