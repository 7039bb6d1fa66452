// Tells groups this rank has had from groups it may still make. Messages for past groups are dropped, for future groups
// kept.
//
// new_group and split number groups within their parent ("world/3", "world/4.1"), in the order in which all its ranks
// make them, so the last number stands for all earlier ones. Only names without a number are stored individually.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace maniple {

class PastGroups {
 public:
  void add(const std::string& name);   ///< this rank makes the group
  void skip(const std::string& name);  ///< others make the group without this rank
  void remove(const std::string& name);
  /// Whether this rank has had the group, or is not in it: it will never have it again.
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
  std::set<std::string> named_;                // removed groups without a number
};

}  // namespace maniple
