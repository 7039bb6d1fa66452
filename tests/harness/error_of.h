// Returns the text of the InvalidArgument that a call throws, or "no error".
#pragma once

#include <string>

#include <maniple/comm/error.h>

namespace maniple {

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace maniple
