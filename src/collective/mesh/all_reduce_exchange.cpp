// all_reduce, exchange: two ranks send each other everything, in chunks, and both reduce.
//
// One step; B sent by each rank and the same received, which for two ranks is what the direct way sends too. That has a
// second step, in which a rank waits for the other's arithmetic; here nobody waits for anything but the wire, at the price
// of reducing all of the buffer instead of half of it. The operands are in rank order, so both get the same bits, and those
// of the direct way.
#include <vector>

#include "collective/mesh/algorithms.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/reduction.h"

namespace maniple {
namespace {
constexpr std::size_t kSlots = 4;  // chunks on their way to this rank; they and their operands stay in a core's cache
}

void mesh_all_reduce_exchange(Exchange& exchange, const Operation& operation) {
  if (exchange.size() != 2) return mesh_all_reduce_direct(exchange, operation);
  const int rank = exchange.rank();
  const int peer = 1 - rank;
  const std::size_t element = operation.element();
  const Chunks chunks{{0, operation.count}, chunk_elements(operation.count, element)};
  const std::size_t slot_bytes = chunks.each * element;
  const std::span<std::byte> scratch = exchange.scratch(kSlots * slot_bytes);
  const auto slot = [&](std::size_t c) { return scratch.data() + c % kSlots * slot_bytes; };
  const auto bytes_of = [&](std::size_t c) { return chunks.at(c).count * element; };

  std::vector<Exchange::Ticket> receives(chunks.count());
  std::vector<Exchange::Ticket> sends(chunks.count());
  const auto post_receive = [&](std::size_t c) { receives[c] = exchange.recv(peer, {slot(c), bytes_of(c)}); };
  for (std::size_t c = 0; c < chunks.count() && c < kSlots; ++c) post_receive(c);
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    sends[c] = exchange.send(peer, bytes_at(operation.in, element, chunks.at(c)));
  }
  const Reduction reduction = whole_reduction(operation, 2);
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    const Slice slice = chunks.at(c);
    exchange.wait(receives[c]);
    exchange.wait(sends[c]);  // the result may take the operand's place
    if (slice.count > 0) {
      const void* own = operation.in + slice.offset * element;
      const void* const sources[2] = {rank == 0 ? own : slot(c), rank == 0 ? slot(c) : own};
      void* const destination = operation.out + slice.offset * element;
      reduce(reduction, sources, {&destination, 1}, slice.count);
    }
    if (c + kSlots < chunks.count()) post_receive(c + kSlots);
  }
  exchange.wait_all();
}

}  // namespace maniple
