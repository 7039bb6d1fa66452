// Maniple's errors as exceptions with Python classes in maniple_torch: PeerLost, Timeout, ...
#pragma once

#include <string>

#include <torch/csrc/Exceptions.h>

#include <maniple/c.h>

namespace maniple_torch {

inline constexpr int kErrorKinds = MANIPLE_UNSUPPORTED + 1;

/// An exception whose Python class PyTorch queries, even if it passes through autograd (backward of DDP).
class Failure : public torch::PyTorchError {
 public:
  Failure(int kind, const std::string& text) : torch::PyTorchError(text), kind_(kind) {}
  PyObject* python_type() override;

 private:
  int kind_;
};

/// Sets the Python class for an error number of maniple/c.h. Called once per number, when the module is imported.
void set_python_type(int kind, PyObject* type);

/// Converts and frees the error; null for null.
std::exception_ptr exception_of(maniple_error* error);
/// Throws the error's exception, if `error` is not null.
void check(maniple_error* error);

[[noreturn]] inline void refuse(const std::string& text) { throw Failure(MANIPLE_INVALID_ARGUMENT, text); }

}  // namespace maniple_torch
