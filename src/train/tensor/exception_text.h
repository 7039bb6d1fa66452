// The text of an exception, for messages that name it as the cause. A separate header because several folders need it.
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace maniple {

/// LibTorch's what() ends with a stack trace, which this leaves out. `thrown` must not be null.
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
