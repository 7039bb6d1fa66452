// The mesh algorithms and their selection. They run between hosts, or everywhere when shared memory is disabled.
//
// To add one, write a function in its operation's file, a declaration here and a line in the table of algorithms.cpp.
// Each algorithm performs one operation for the ranks of an Exchange; `operation.root` and all parts refer to ranks of
// the exchange.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "comm/call/operation.h"
#include "comm/transport/exchange.h"

namespace maniple {

using MeshAlgorithm = void (*)(Exchange&, const Operation&);

struct MeshEntry {
  Op op;
  std::string_view name;      ///< as listed by `maniple bench --list` and accepted by MANIPLE_ALGORITHM
  std::string_view sentence;  ///< what it does and when to use it
  MeshAlgorithm run;
};

/// All algorithms, grouped by operation, the generally best first.
std::span<const MeshEntry> mesh_algorithms() noexcept;

/// Null if the operation has no algorithm of that name.
const MeshEntry* find_mesh_algorithm(Op op, std::string_view name) noexcept;

/// Posts the header round, in which every rank sends every other its call's signature, so that ranks that disagree get
/// an error instead of waiting for each other. Algorithms in which some pairs exchange no data begin with it; their
/// wait_all() completes it.
///
/// The round costs a header of 64 bytes each way per pair and no extra waiting: headers travel ahead of the data and
/// are compared while the data are awaited. Beyond 64 ranks only pairs at distances 1, 2, 4, ... compare; as these
/// connect all ranks, some pair still detects any disagreement.
void post_headers(Exchange& exchange);

/// Send to, or receive from, one rank a frame without payload.
inline void send_header(Exchange& exchange, int peer) { exchange.send(peer, {}); }
inline void recv_header(Exchange& exchange, int peer) { exchange.recv(peer, {}); }

void mesh_barrier_direct(Exchange& exchange, const Operation& operation);
void mesh_barrier_dissemination(Exchange& exchange, const Operation& operation);
void mesh_broadcast_direct(Exchange& exchange, const Operation& operation);
void mesh_broadcast_tree(Exchange& exchange, const Operation& operation);
void mesh_broadcast_scatter_gather(Exchange& exchange, const Operation& operation);
void mesh_reduce_direct(Exchange& exchange, const Operation& operation);
void mesh_reduce_tree(Exchange& exchange, const Operation& operation);
void mesh_all_reduce_direct(Exchange& exchange, const Operation& operation);
void mesh_all_reduce_exchange(Exchange& exchange, const Operation& operation);
void mesh_all_reduce_ring(Exchange& exchange, const Operation& operation);
void mesh_all_reduce_tree(Exchange& exchange, const Operation& operation);
void mesh_gather_direct(Exchange& exchange, const Operation& operation);
void mesh_all_gather_direct(Exchange& exchange, const Operation& operation);
void mesh_all_gather_ring(Exchange& exchange, const Operation& operation);
void mesh_scatter_direct(Exchange& exchange, const Operation& operation);
void mesh_reduce_scatter_direct(Exchange& exchange, const Operation& operation);
void mesh_reduce_scatter_ring(Exchange& exchange, const Operation& operation);
void mesh_all_to_all_direct(Exchange& exchange, const Operation& operation);

// The rules that select an algorithm. (In shared memory shm/run.cpp selects, by size and memory.)

/// Selects the algorithm between ranks that exchange messages. `forced` wins if the operation has an algorithm of that
/// name.
const MeshEntry& choose_mesh_algorithm(const Operation& operation, int ranks, std::string_view forced) noexcept;

/// Throws InvalidArgument, listing the valid names, unless `name` is empty or some operation has an algorithm of that
/// name.
void require_algorithm(std::string_view name);

/// One line per algorithm: operation, name, sentence.
std::string list_algorithms();

}  // namespace maniple
