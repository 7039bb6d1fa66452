#include "collective/mesh/ring.h"

#include <vector>

#include "collective/mesh/chunks.h"
#include "collective/reduce/reduce.h"

namespace maniple {
namespace {

// Step s passes slice (rank - 1 - s) on to the next rank and takes slice (rank - 2 - s) from the one before; the last
// brings this rank's own. What arrives in step s is kept in one of two buffers until it has been sent on in step s+1: the
// place of a chunk is free for step s+2 then.
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

  // This rank's operand as it enters a sum: multiplied first where the operation says so.
  const std::byte* operand(Slice slice, std::byte* multiplied) const {
    if (!premultiplied_) return input(slice);
    const void* const source = input(slice);
    apply(reduction_of(operation_, size_), {&source, 1}, multiplied, slice.count);
    return multiplied;
  }

  void send_first() {
    for (std::size_t c = 0; c < outgoing(0).count(); ++c) {
      // The second buffer is not received into before these have been sent.
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
