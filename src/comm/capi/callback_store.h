// A Store whose operations are callbacks supplied by a program that uses maniple/c.h.
//
// The callbacks never wait for a key; waiting is done by polling. Some stores serve one request at a time, where a
// waiting request would block all other threads of the process.
#pragma once

#include <memory>

#include <maniple/c.h>
#include <maniple/comm/store.h>

namespace maniple {

/// Takes ownership of the store: calls `release` with the last reference to the result.
std::shared_ptr<Store> make_callback_store(const maniple_store& store);

}  // namespace maniple
