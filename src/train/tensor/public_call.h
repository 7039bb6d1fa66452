// The public call that this thread is in; errors name it instead of lines of the library.
//
//   void Checkpoint::save(std::int64_t step, SourceLocation where) {
//     const PublicCall call("Checkpoint::save, which all ranks call", where);
//     ...
//       ranks->gather(mine, all, 0, {}, {}, public_place());   // "in Checkpoint::save, ... (train.cpp:40)"
//
// Every collective that src/train makes for a program passes public_place() as its last argument. The default would be
// a line of the library, and the library would then contain paths of the build machine, which tests/style/paths.sh
// detects.
#pragma once

#include <maniple/comm/source_location.h>

namespace maniple {

/// Lives on the stack of the calling thread. Calls nest: errors name the innermost call, then the outermost.
class PublicCall {
 public:
  /// `name` is a literal. `where` is the program's line; if empty, the line of the enclosing call, if there is one.
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

/// "in NAME (in OUTERMOST at FILE:LINE)" as a place without its own line; empty outside any public call.
SourceLocation public_place();

}  // namespace maniple
