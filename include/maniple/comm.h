// Communication between ranks, without LibTorch. The contract is in comm/process_group.h.
//
//   auto world = maniple::init();
//   world->all_reduce(maniple::buffer_of(x));
#pragma once

#include <maniple/comm/deadline.h>
#include <maniple/comm/error.h>
#include <maniple/comm/mesh.h>
#include <maniple/comm/options.h>
#include <maniple/comm/process_group.h>
#include <maniple/comm/registered_memory.h>
#include <maniple/comm/store.h>
#include <maniple/comm/topology.h>
#include <maniple/comm/types.h>
#include <maniple/comm/work.h>
#include <maniple/version.h>
