// Adapts the store that torch.distributed passes to a backend to the store of maniple/c.h.
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <maniple/c.h>

namespace maniple_torch {

/// Holds a reference to the store until Maniple releases it. `description` must live until maniple_init has returned.
maniple_store store_of(c10::intrusive_ptr<c10d::Store> store, const std::string& description);

}  // namespace maniple_torch
