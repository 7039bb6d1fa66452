// Errors of Maniple as exceptions that Python sees as classes of maniple_torch: PeerLost, Timeout, ...
#pragma once

#include <string>

#include <torch/csrc/Exceptions.h>

#include <maniple/c.h>

namespace maniple_torch {

inline constexpr int kErrorKinds = MANIPLE_UNSUPPORTED + 1;

/// PyTorch asks such an exception for its class in Python, also where it passes through autograd (backward of DDP).
class Failure : public torch::PyTorchError {
 public:
  Failure(int kind, const std::string& text) : torch::PyTorchError(text), kind_(kind) {}
  PyObject* python_type() override;

 private:
  int kind_;
};

/// The classes, by number of maniple/c.h. Set once, when the module is imported.
void set_python_type(int kind, PyObject* type);

/// Null for null; frees the error.
std::exception_ptr exception_of(maniple_error* error);
/// Throws it, if there is one.
void check(maniple_error* error);

[[noreturn]] inline void refuse(const std::string& text) { throw Failure(MANIPLE_INVALID_ARGUMENT, text); }

}  // namespace maniple_torch
