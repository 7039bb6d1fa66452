// Several sources of tests in one program: each is an entry of its own in ctest, which names its files in MANIPLE_TEST_FILES.
#pragma once

#include <string_view>

namespace maniple::harness {

/// Of the tests that the filter lets through, only those in these files (names without folders, separated by blanks) will run.
/// False, with a word on stderr, if one of the files holds no test of this program.
bool choose_files(std::string_view names);

}  // namespace maniple::harness
