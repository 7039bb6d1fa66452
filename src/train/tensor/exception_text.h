// What an exception says, for a message of ours that names it as the cause. A header of its own because it is needed in
// several folders.
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace maniple {

/// LibTorch's exceptions without the stack trace that their what() ends with. Not null.
inline std::string exception_text(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace maniple
