#include "collective/mesh/slices.h"

#include <algorithm>
#include <vector>

#include "collective/mesh/chunks.h"
#include "collective/reduce/reduce.h"
#include "topology/rank_arithmetic.h"

namespace maniple {
namespace {

constexpr std::size_t kLag = 3;
constexpr std::size_t kSlots = kLag + 1;

class SlicePipeline {
 public:
  SlicePipeline(Exchange& exchange, const SliceWork& work)
      : exchange_(exchange),
        work_(work),
        rank_(exchange.rank()),
        size_(exchange.size()),
        element_(size_of(work.reduction.dtype)),
        chunk_(chunk_elements(work.slices.largest(), element_)),
        raw_tickets_(static_cast<std::size_t>(size_) * kSlots) {
    const std::size_t slots = static_cast<std::size_t>(size_) * kSlots * chunk_ * element_;
    const std::size_t kept = work.own == nullptr ? work.slices.count(rank_) * element_ : 0;
    const std::span<std::byte> scratch = exchange.scratch(slots + kept);
    slots_ = scratch.data();
    own_ = work.own == nullptr ? scratch.data() + slots : work.own;
  }

  std::span<const std::byte> run() {
    std::size_t steps = 0;
    for (int owner = 0; owner < size_; ++owner) steps = std::max(steps, chunks_of(owner).count() + kLag);
    for (std::size_t step = 0; step < steps; ++step) {
      post_receives(step);
      send_raw(step);
      if (step >= kLag && step - kLag < chunks_of(rank_).count()) finish_own(step - kLag);
    }
    exchange_.wait_all();
    return {own_, work_.slices.count(rank_) * element_};
  }

 private:
  Chunks chunks_of(int owner) const { return {part_of(work_.slices, owner), chunk_}; }

  bool in_audience(int rank) const {
    return work_.audience == SliceWork::Audience::everyone ||
           (work_.audience == SliceWork::Audience::root && rank == work_.root);
  }

  std::byte* slot(std::size_t chunk, int peer) const {
    return slots_ +
           (chunk % kSlots * static_cast<std::size_t>(size_) + static_cast<std::size_t>(peer)) * chunk_ * element_;
  }
  Exchange::Ticket& raw_ticket(std::size_t chunk, int peer) {
    return raw_tickets_[chunk % kSlots * static_cast<std::size_t>(size_) + static_cast<std::size_t>(peer)];
  }

  void post_receives(std::size_t step) {
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = ring_rank(rank_, -distance, size_);
      if (step < chunks_of(rank_).count()) {
        const std::size_t bytes = chunks_of(rank_).at(step).count * element_;
        raw_ticket(step, peer) = exchange_.recv(peer, {slot(step, peer), bytes});
      }
      if (in_audience(rank_) && step >= kLag && step - kLag < chunks_of(peer).count()) {
        exchange_.recv(peer, bytes_at(work_.all, element_, chunks_of(peer).at(step - kLag)));
      }
    }
  }

  void send_raw(std::size_t step) {
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = ring_rank(rank_, distance, size_);
      const Chunks chunks = chunks_of(peer);
      if (step < chunks.count()) exchange_.send(peer, bytes_at(work_.in, element_, chunks.at(step)));
    }
  }

  void finish_own(std::size_t chunk) {
    const Slice slice = chunks_of(rank_).at(chunk);
    const Slice in_own{slice.offset - work_.slices.offset(rank_), slice.count};
    std::byte* const result = slice.count == 0 ? own_ : own_ + in_own.offset * element_;
    sources_.clear();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) {
        sources_.push_back(work_.in + slice.offset * element_);
      } else {
        exchange_.wait(raw_ticket(chunk, peer));
        sources_.push_back(slot(chunk, peer));
      }
    }
    if (slice.count > 0) {
      void* const destination = result;
      reduce(work_.reduction, sources_, {&destination, 1}, slice.count);
    }
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = ring_rank(rank_, distance, size_);
      if (in_audience(peer)) exchange_.send(peer, {result, slice.count * element_});
    }
  }

  Exchange& exchange_;
  const SliceWork& work_;
  const int rank_;
  const int size_;
  const std::size_t element_;
  const std::size_t chunk_;  // elements
  std::vector<Exchange::Ticket> raw_tickets_;
  std::vector<const void*> sources_;
  std::byte* slots_ = nullptr;
  std::byte* own_ = nullptr;
};

}  // namespace

std::span<const std::byte> reduce_by_slices(Exchange& exchange, const SliceWork& work) {
  return SlicePipeline(exchange, work).run();
}

void reduce_at_once(Exchange& exchange, const Operation& operation, SliceWork::Audience audience) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const std::size_t bytes = operation.bytes();
  const auto in_audience = [&](int peer) {
    return audience == SliceWork::Audience::everyone || peer == operation.root;
  };
  const std::span<std::byte> scratch =
      in_audience(rank) ? exchange.scratch(bytes * static_cast<std::size_t>(size)) : std::span<std::byte>();

  std::vector<const void*> sources(static_cast<std::size_t>(size));
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    const auto place =
        in_audience(rank) ? scratch.subspan(bytes * static_cast<std::size_t>(peer), bytes) : std::span<std::byte>();
    sources[static_cast<std::size_t>(peer)] = place.data();
    exchange.recv(peer, place);
  }
  sources[static_cast<std::size_t>(rank)] = operation.in;
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, distance, size);
    exchange.send(peer, in_audience(peer) ? std::span(operation.in, bytes) : std::span<const std::byte>());
  }
  exchange.wait_all();
  if (!in_audience(rank) || bytes == 0) return;
  void* const destination = operation.out;
  reduce(reduction_of(operation, size), sources, {&destination, 1}, operation.count);
}

}  // namespace maniple
