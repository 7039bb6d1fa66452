#include "errors.h"

#include <array>
#include <exception>

namespace maniple_torch {
namespace {

std::array<PyObject*, kErrorKinds> python_types{};

}  // namespace

PyObject* Failure::python_type() {
  PyObject* type = kind_ >= 0 && kind_ < kErrorKinds ? python_types[static_cast<std::size_t>(kind_)] : nullptr;
  return type != nullptr ? type : PyExc_RuntimeError;
}

void set_python_type(int kind, PyObject* type) { python_types.at(static_cast<std::size_t>(kind)) = type; }

std::exception_ptr exception_of(maniple_error* error) {
  if (error == nullptr) return nullptr;
  const Failure failure(maniple_error_kind(error), maniple_error_text(error));
  maniple_error_free(error);
  return std::make_exception_ptr(failure);
}

void check(maniple_error* error) {
  if (error != nullptr) std::rethrow_exception(exception_of(error));
}

}  // namespace maniple_torch
