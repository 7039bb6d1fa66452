#include "comm/collective/mesh/slices.h"

#include <algorithm>
#include <vector>

#include "comm/base/rank_arithmetic.h"
#include "comm/collective/reduce/reduce.h"

namespace maniple {
namespace {

// Number of chunks by which reduced chunks follow raw ones. More keep longer links full; fewer keep the data in transit
// in the caches and shorten the tail, as a short slice has only two chunks.
std::size_t lag_of(std::size_t chunks) { return std::clamp<std::size_t>(chunks / 2, 1, 2); }

class SlicePipeline {
 public:
  SlicePipeline(Exchange& exchange, const SliceWork& work)
      : exchange_(exchange),
        work_(work),
        rank_(exchange.rank()),
        size_(exchange.size()),
        element_(size_of(work.reduction.dtype)),
        chunk_(chunk_elements(work.slices.largest(), element_)),
        lag_(lag_of(Chunks{{0, work.slices.largest()}, chunk_}.count())),
        raw_tickets_(size_ * slots_each()) {
    const std::size_t slots = size_ * slots_each() * chunk_ * element_;
    const std::size_t kept = work.own == nullptr ? work.slices.count(rank_) * element_ : 0;
    const std::span<std::byte> scratch = exchange.scratch(slots + kept);
    slots_ = scratch.data();
    own_ = work.own == nullptr ? scratch.data() + slots : work.own;
  }

  std::span<const std::byte> run() {
    std::size_t steps = 0;
    for (int owner = 0; owner < size_; ++owner) steps = std::max(steps, chunks_of(owner).count() + lag_);
    for (std::size_t step = 0; step < steps; ++step) {
      post_receives(step);
      send_raw(step);
      if (step >= lag_ && step - lag_ < chunks_of(rank_).count()) finish_own(step - lag_);
    }
    exchange_.wait_all();
    return {own_, work_.slices.count(rank_) * element_};
  }

 private:
  Chunks chunks_of(int owner) const { return {part_of(work_.slices, owner), chunk_}; }
  std::size_t slots_each() const { return lag_ + 1; }  // chunks in transit from each rank

  bool in_audience(int rank) const {
    return work_.audience == SliceWork::Audience::everyone ||
           (work_.audience == SliceWork::Audience::root && rank == work_.root);
  }

  std::byte* slot(std::size_t chunk, int peer) const {
    return slots_ + (chunk % slots_each() * size_ + peer) * chunk_ * element_;
  }
  Exchange::Ticket& raw_ticket(std::size_t chunk, int peer) {
    return raw_tickets_[chunk % slots_each() * size_ + peer];
  }

  void post_receives(std::size_t step) {
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = ring_rank(rank_, -distance, size_);
      if (step < chunks_of(rank_).count()) {
        const std::size_t bytes = chunks_of(rank_).at(step).count * element_;
        raw_ticket(step, peer) = exchange_.recv(peer, {slot(step, peer), bytes});
      }
      if (in_audience(rank_) && step >= lag_ && step - lag_ < chunks_of(peer).count()) {
        exchange_.recv(peer, bytes_at(work_.all, element_, chunks_of(peer).at(step - lag_)));
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
  const std::size_t lag_;
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
  const std::span<std::byte> scratch = in_audience(rank) ? exchange.scratch(bytes * size) : std::span<std::byte>();

  std::vector<const void*> sources(size);
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    const auto place = in_audience(rank) ? scratch.subspan(bytes * peer, bytes) : std::span<std::byte>();
    sources[peer] = place.data();
    exchange.recv(peer, place);
  }
  sources[rank] = operation.in;
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, distance, size);
    exchange.send(peer, in_audience(peer) ? std::span(operation.in, bytes) : std::span<const std::byte>());
  }
  exchange.wait_all();
  if (!in_audience(rank) || bytes == 0) return;
  void* const destination = operation.out;
  reduce(reduction_of(operation, size), sources, {&destination, 1}, operation.count);
}

namespace {

// Step s sends slice (rank - 1 - s) to the next rank and receives slice (rank - 2 - s) from the previous one; the last
// step receives this rank's own slice. Data received in step s stays in one of two buffers until it has been sent on in
// step s+1; the chunk's place is then free for step s+2.
class RingReduction {
 public:
  RingReduction(Exchange& exchange, const Operation& operation, const Parts& slices, std::byte* own)
      : exchange_(exchange),
        operation_(operation),
        slices_(slices),
        rank_(exchange.rank()),
        size_(exchange.size()),
        steps_(size_ - 1),
        element_(operation.element()),
        chunk_(chunk_elements(slices.largest(), element_)),
        own_(own),
        premultiplied_(operation.reduce.kind() == ReduceOp::premul_sum) {
    const std::size_t slice_bytes = slices.largest() * element_;
    const std::span<std::byte> scratch = exchange.scratch((premultiplied_ ? 4 : 3) * slice_bytes);
    buffers_[0] = scratch.data();
    buffers_[1] = scratch.data() + slice_bytes;
    if (own_ == nullptr) own_ = scratch.data() + 2 * slice_bytes;
    if (premultiplied_) multiplied_ = scratch.data() + 3 * slice_bytes;
    most_chunks_ = Chunks{{0, slices.largest()}, chunk_}.count();
    for (int parity = 0; parity < 2; ++parity) {
      sends_[parity].resize(most_chunks_);
      receives_[parity].resize(most_chunks_);
    }
  }

  std::span<const std::byte> run() {
    if (steps_ == 0) {
      combine_alone();
    } else {
      for (std::size_t c = 0; c < incoming(0).count(); ++c) post_receive(0, c);
      send_first();
      for (int step = 0; step < steps_; ++step) {
        for (std::size_t c = 0; c < most_chunks_; ++c) {
          if (c < incoming(step).count()) combine(step, c);
          if (step + 1 < steps_ && c < incoming(step + 1).count()) {
            if (c < outgoing(step).count()) exchange_.wait(sends_[step % 2][c]);
            post_receive(step + 1, c);
          }
        }
      }
    }
    return {own_, slices_.count(rank_) * element_};
  }

 private:
  Chunks chunks_of(int slice) const { return {part_of(slices_, slice), chunk_}; }
  Chunks outgoing(int step) const { return chunks_of(ring_rank(rank_, -1 - step, size_)); }
  Chunks incoming(int step) const { return chunks_of(ring_rank(rank_, -2 - step, size_)); }
  std::byte* place(int step, std::size_t c) const { return buffers_[step % 2] + c * chunk_ * element_; }
  const std::byte* input(Slice slice) const { return operation_.in + slice.offset * element_; }

  void post_receive(int step, std::size_t c) {
    receives_[step % 2][c] =
        exchange_.recv(ring_rank(rank_, -1, size_), {place(step, c), incoming(step).at(c).count * element_});
  }

  void send(int step, std::size_t c, const std::byte* from) {
    sends_[step % 2][c] = exchange_.send(ring_rank(rank_, 1, size_), {from, outgoing(step).at(c).count * element_});
  }

  void apply(const Reduction& reduction, std::span<const void* const> sources, std::byte* to, std::size_t count) const {
    if (count == 0) return;
    void* const destination = to;
    reduce(reduction, sources, {&destination, 1}, count);
  }

  // This rank's operand of a sum: multiplied first if the operation is premul_sum.
  const std::byte* operand(Slice slice, std::byte* multiplied) const {
    if (!premultiplied_) return input(slice);
    const void* const source = input(slice);
    apply(reduction_of(operation_, size_), {&source, 1}, multiplied, slice.count);
    return multiplied;
  }

  void send_first() {
    for (std::size_t c = 0; c < outgoing(0).count(); ++c) {
      // Nothing is received into the second buffer before these chunks have been sent.
      send(0, c, operand(outgoing(0).at(c), buffers_[1] + c * chunk_ * element_));
    }
  }

  void combine(int step, std::size_t c) {
    const Slice slice = incoming(step).at(c);
    const bool last = step + 1 == steps_;
    exchange_.wait(receives_[step % 2][c]);
    std::byte* const result = last ? own_ + c * chunk_ * element_ : place(step, c);
    const void* const sources[2] = {place(step, c), operand(slice, multiplied_)};
    apply(stage_reduction(operation_, size_, last), sources, result, slice.count);
    if (!last) send(step + 1, c, result);
  }

  void combine_alone() {
    const Slice slice = part_of(slices_, rank_);
    const void* const source = input(slice);
    apply(reduction_of(operation_, size_), {&source, 1}, own_, slice.count);
  }

  Exchange& exchange_;
  const Operation& operation_;
  const Parts& slices_;
  const int rank_;
  const int size_;
  const int steps_;
  const std::size_t element_;
  const std::size_t chunk_;  // elements
  std::byte* own_;
  const bool premultiplied_;
  std::byte* buffers_[2] = {};
  std::byte* multiplied_ = nullptr;
  std::size_t most_chunks_ = 0;
  std::vector<Exchange::Ticket> sends_[2];
  std::vector<Exchange::Ticket> receives_[2];
};

}  // namespace

std::span<const std::byte> ring_reduce_slices(Exchange& exchange, const Operation& operation, const Parts& slices,
                                              std::byte* own) {
  return RingReduction(exchange, operation, slices, own).run();
}

void ring_gather_slices(Exchange& exchange, std::byte* all, const Parts& slices, std::size_t element) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const int next = ring_rank(rank, 1, size);
  const std::size_t chunk = chunk_elements(slices.largest(), element);
  const auto chunks_of = [&](int steps) { return Chunks{part_of(slices, ring_rank(rank, -steps, size)), chunk}; };

  std::vector<Exchange::Ticket> receives;
  for (int step = 1; step < size; ++step) {
    for (std::size_t c = 0; c < chunks_of(step).count(); ++c) {
      receives.push_back(exchange.recv(ring_rank(rank, -1, size), bytes_at(all, element, chunks_of(step).at(c))));
    }
  }
  std::size_t received = 0;
  for (int step = 0; step + 1 < size; ++step) {
    for (std::size_t c = 0; c < chunks_of(step).count(); ++c) {
      if (step > 0) exchange.wait(receives[received++]);
      exchange.send(next, bytes_at(all, element, chunks_of(step).at(c)));
    }
  }
  exchange.wait_all();
}

}  // namespace maniple
