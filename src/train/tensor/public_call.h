// The public call that this thread is in, which errors name instead of lines of the library.
//
//   void Checkpoint::save(std::int64_t step, SourceLocation where) {
//     const PublicCall call("Checkpoint::save, which all ranks call", where);
//     ...
//       ranks->gather(mine, all, 0, {}, {.where = public_place()});   // "in Checkpoint::save, ... (train.cpp:40)"
//
// Every collective that src/train/tensor and src/train make on a program's behalf passes public_place(): the default of
// CallOptions::where would be a line of the library, and the library would hold paths of the machine that built it,
// which tests/style/paths.sh finds.
#pragma once

#include <maniple/comm/source_location.h>

namespace maniple {

/// Lives on the stack of the thread that makes the call. Calls nest: the innermost is named, then the outermost.
class PublicCall {
 public:
  /// `name` is a literal. `where`: the program's line; empty: that of the call around this one, if it has one.
  explicit PublicCall(const char* name, const SourceLocation& where = {}) noexcept;
  ~PublicCall();
  PublicCall(const PublicCall&) = delete;
  PublicCall& operator=(const PublicCall&) = delete;

 private:
  friend SourceLocation public_place();
  const char* name_;
  SourceLocation where_;
  const PublicCall* outer_;
};

/// "in NAME (in OUTERMOST at FILE:LINE)" as a place without a line of its own; empty outside of any public call.
SourceLocation public_place();

}  // namespace maniple
