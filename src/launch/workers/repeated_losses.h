// When a rank dies, all that wait for it say so, each in a line of its own: the first is shown, the others are counted. Pure.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

namespace maniple::launch {

class RepeatedLosses {
 public:
  /// A line of errors of rank `by`. True if it says that a rank is lost of which another line has said so: need not be shown.
  bool take(int by, std::string_view line);
  /// "maniple: ranks 0, 3 said the same of rank 2", a line for each lost rank; empty if there is nothing to tell. Forgets
  /// what it has told.
  std::string summary();

 private:
  struct Loss {
    int first = -1;  // who said it first
    std::set<int> others;
  };
  std::map<int, Loss> losses_;  // by the rank that is lost
};

}  // namespace maniple::launch
