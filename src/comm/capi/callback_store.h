// A Store whose operations are functions that a program of maniple/c.h brought along.
//
// Those functions never wait for a key, so whoever waits asks again and again: some stores serve one request at a time,
// and one that waited would keep all other threads of the process out.
#pragma once

#include <memory>

#include <maniple/c.h>
#include <maniple/comm/store.h>

namespace maniple {

/// Takes the store: `release` is called when the last reference to the result goes.
std::shared_ptr<Store> make_callback_store(const maniple_store& store);

}  // namespace maniple
