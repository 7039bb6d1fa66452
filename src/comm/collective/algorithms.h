// The algorithms that run over the mesh (between hosts, or anywhere when shared memory is not to be used), and which of
// them is chosen.
//
// A new one is a function in the file of its operation, a declaration here and a line in the table of algorithms.cpp.
// Each does one operation for the ranks of an Exchange; `operation.root` and all parts are counted in the exchange's
// ranks.
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
  std::string_view name;      ///< as `maniple bench --list` shows it and MANIPLE_ALGORITHM takes it
  std::string_view sentence;  ///< what it does and when it is right
  MeshAlgorithm run;
};

/// Every algorithm; those of one operation stand together, the generally best first.
std::span<const MeshEntry> mesh_algorithms() noexcept;

/// Null when there is none of that name for the operation.
const MeshEntry* find_mesh_algorithm(Op op, std::string_view name) noexcept;

/// Posts the header round, in which every rank shows every other what it called, so that ranks that disagree get an
/// error instead of waiting for each other. Algorithms in which some pairs exchange no data begin with it; their
/// wait_all() completes it.
///
/// It costs a header of 64 bytes each way for a pair and no waiting of its own: the headers go ahead of the data, and
/// are compared while the data are awaited. Beyond 64 ranks only pairs at distances 1, 2, 4, ... compare; as these
/// connect all ranks, any disagreement is still seen by one of them.
void post_headers(Exchange& exchange);

/// A frame without payload to and from one rank.
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

// Which algorithm runs: the rules in one place. (In shared memory the choice is made in shm/run.cpp, by size and
// memory.)

/// For ranks that exchange messages. `forced` is taken where the operation has an algorithm of that name.
const MeshEntry& choose_mesh_algorithm(const Operation& operation, int ranks, std::string_view forced) noexcept;

/// Throws InvalidArgument, listing the names there are, unless some operation has an algorithm of that name (or it is
/// empty).
void require_algorithm(std::string_view name);

/// One line for each algorithm: operation, name, sentence.
std::string list_algorithms();

}  // namespace maniple
