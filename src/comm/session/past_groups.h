// Which groups this rank has had, and which it may still make: what arrives for the first kind is dropped, for the
// second kept.
//
// Groups made by new_group and split are numbered in their parent ("world/3", "world/4.1"), in the order in which all
// its ranks make them; so the last number stands for all before it. Only names without a number are remembered one by
// one.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace maniple {

class PastGroups {
 public:
  void add(const std::string& name);   ///< this rank makes it
  void skip(const std::string& name);  ///< others make it, without this rank
  void remove(const std::string& name);
  /// This rank has had the group, or is not in it: it never has it again.
  bool contains(const std::string& name) const;

 private:
  struct Numbered {
    std::string parent;
    unsigned long number;
  };
  static std::optional<Numbered> parse(std::string_view name);
  bool note_number(const std::string& name);

  std::set<std::string> present_;
  std::map<std::string, unsigned long> last_;  // present group -> the number of the last group made from it
  std::set<std::string> named_;                // that have been removed and have no number
};

}  // namespace maniple
