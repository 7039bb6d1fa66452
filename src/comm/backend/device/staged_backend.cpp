// A backend for device memory that wraps a backend for host memory.
//
// The stream copies into pinned memory and then waits for a word there; the group's thread runs the operation on the
// host and sets the word; the stream copies back. Large operations go in pieces, so that copying and communicating
// overlap. The calling thread does not wait.
#include <time.h>

#include <algorithm>
#include <atomic>

#include <fmt/format.h>

#include "comm/backend/backend.h"
#include "comm/backend/device/device_streams.h"
#include "comm/base/abort_signal.h"

namespace maniple {
namespace {

constexpr std::size_t kPiece = std::size_t{4} << 20;  // bytes per piece
constexpr std::size_t kWordStride = 64;               // bytes between wait words in pinned memory

std::size_t round_up(std::size_t bytes) { return (bytes + kWordStride - 1) / kWordStride * kWordStride; }

void set_word(std::uint32_t* word) { std::atomic_ref<std::uint32_t>(*word).store(1, std::memory_order_release); }
void clear_word(std::uint32_t* word) { std::atomic_ref<std::uint32_t>(*word).store(0, std::memory_order_relaxed); }

/// Elements in this rank's `in` and `out`; 0 for an unused buffer.
struct Extent {
  std::size_t in = 0;
  std::size_t out = 0;
};

Extent extent_of(const Operation& op, int rank) {
  const bool root = op.root == rank;
  switch (op.op) {
    case Op::broadcast: return root ? Extent{op.count, 0} : Extent{0, op.count};
    case Op::reduce: return {op.count, root ? op.count : 0};
    case Op::all_reduce: return {op.count, op.count};
    case Op::gather: return {op.parts.count(rank), root ? op.parts.total() : 0};
    case Op::all_gather: return {op.parts.count(rank), op.parts.total()};
    case Op::scatter: return {root ? op.parts.total() : 0, op.parts.count(rank)};
    case Op::reduce_scatter: return {op.parts.total(), op.parts.count(rank)};
    case Op::all_to_all: return {op.in_parts.total(), op.out_parts.total()};
    default: return {};
  }
}

bool has_pieces(Op op) { return op == Op::broadcast || op == Op::reduce || op == Op::all_reduce; }

/// A piece of an operation, on pinned memory.
struct Piece {
  Operation operation;
  std::shared_ptr<const DeviceEvent> copied;
  std::uint32_t* word;
};

class StagedPart final : public HostPart {
 public:
  StagedPart(std::vector<Piece> pieces, std::shared_ptr<std::byte> memory, DeviceRuntime& runtime, AbortSignal& abort)
      : pieces_(std::move(pieces)), memory_(std::move(memory)), runtime_(runtime), abort_(abort) {}

  void run(const std::function<void(Operation& piece)>& execute) override {
    for (Piece& piece : pieces_) {
      while (!runtime_.reached(*piece.copied)) {
        abort_.check();
        const timespec pause{0, 20'000};
        ::nanosleep(&pause, nullptr);  // sleep: device events can only be polled
      }
      execute(piece.operation);
      set_word(piece.word);
    }
  }
  void end(const std::exception_ptr& error) override {
    end_->end(error);
    for (const Piece& piece : pieces_) set_word(piece.word);
  }
  const std::shared_ptr<HostEnd>& host_end() const noexcept { return end_; }
  std::span<const Piece> pieces() const noexcept { return pieces_; }

 private:
  std::vector<Piece> pieces_;
  std::shared_ptr<std::byte> memory_;
  DeviceRuntime& runtime_;
  AbortSignal& abort_;
  std::shared_ptr<HostEnd> end_ = std::make_shared<HostEnd>();
};

class StagedBackend final : public Backend {
 public:
  StagedBackend(Backend& host, std::shared_ptr<DeviceStreams> streams, AbortSignal& abort, int rank, std::string name)
      : host_(host),
        streams_(std::move(streams)),
        runtime_(streams_->runtime()),
        abort_(abort),
        rank_(rank),
        name_(std::move(name)) {}

  std::string_view transport() const noexcept override { return host_.transport(); }
  bool serves(Device device) const noexcept override { return !device.is_cpu(); }
  bool can(const Operation& op) const noexcept override { return host_.can(op); }

  Enqueued enqueue(std::span<Operation> operations, const StreamCall& call) override;
  std::vector<Work> enqueue_messages(std::span<const StreamMessage> messages, const StreamCall& call) override;

  RegisteredMemory allocate(std::span<const std::size_t>, std::uint64_t, Deadline) override {
    throw Unsupported(
        fmt::format("allocate: backend {} has no registered memory on a GPU; the backends cuda and nccl have", name_));
  }

 private:
  /// Messages of a batch: they start once the data to send has been copied.
  struct Batch {
    std::vector<std::shared_ptr<Message>> messages;
    std::vector<std::shared_ptr<const DeviceEvent>> copied;
    std::vector<std::shared_ptr<HostEnd>> sends;
  };
  Work enqueue_message(const StreamMessage& one, const StreamCall& call, Batch& batch);

  Backend& host_;
  std::shared_ptr<DeviceStreams> streams_;
  DeviceRuntime& runtime_;
  AbortSignal& abort_;
  int rank_;
  std::string name_;
};

Enqueued StagedBackend::enqueue(std::span<Operation> operations, const StreamCall& call) {
  const Operation& op = operations.front();
  const DeviceStream caller{op.device.index, op.stream};
  if (runtime_.is_capturing(caller)) {
    throw Unsupported(
        fmt::format("{}: backend {} sends GPU memory through host memory, which cannot be captured into a "
                    "CUDA graph; the backends cuda and nccl can",
                    to_string(op.op), name_));
  }
  const Extent extent = extent_of(op, rank_);
  const std::size_t element = op.element();
  const std::size_t in_bytes = extent.in * element, out_bytes = extent.out * element;
  // In place on the host if it is in place on the device; broadcast has one buffer.
  const bool in_place = op.op == Op::broadcast || (op.in == op.out && op.op == Op::all_reduce);
  const std::size_t out_at = in_place ? 0 : round_up(in_bytes);
  const std::size_t per_piece = has_pieces(op.op) ? std::max<std::size_t>(kPiece / element, 1) : 0;
  const std::size_t count = has_pieces(op.op) && op.count > per_piece ? (op.count + per_piece - 1) / per_piece : 1;
  const std::size_t memory_bytes = out_at + std::max(out_bytes, in_place ? in_bytes : 0);
  const auto memory = streams_->make_pinned(caller.device, round_up(memory_bytes) + count * kWordStride);
  std::byte* const words = memory.get() + round_up(memory_bytes);

  const DeviceStream stream = streams_->stream_for(caller, call.async_op, DeviceStreams::Purpose::collectives);
  streams_->order_after_last(stream, false);
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < count; ++i) {
    Piece piece{op, streams_->make_event(stream.device), reinterpret_cast<std::uint32_t*>(words + i * kWordStride)};
    clear_word(piece.word);
    const std::size_t first = i * per_piece;
    Operation& host = piece.operation;
    host.device = {};
    host.stream = nullptr;
    host.in = memory.get() + first * element;
    host.out = memory.get() + out_at + first * element;
    if (count > 1) host.count = std::min(per_piece, op.count - first);
    const std::size_t bytes = count > 1 ? (in_bytes == 0 ? 0 : host.count * element) : in_bytes;
    if (bytes != 0) runtime_.copy(const_cast<std::byte*>(host.in), op.in + first * element, bytes, stream);
    runtime_.record(*piece.copied, stream);
    pieces.push_back(std::move(piece));
  }
  const auto part = std::make_shared<StagedPart>(std::move(pieces), memory, runtime_, abort_);
  for (const Piece& piece : part->pieces()) {
    runtime_.wait_for_bits(stream, piece.word, 1);
    const std::size_t first = piece.operation.out - memory.get() - out_at;
    const std::size_t bytes = count > 1 ? (out_bytes == 0 ? 0 : piece.operation.count * element) : out_bytes;
    if (bytes != 0) runtime_.copy(op.out + first, piece.operation.out, bytes, stream);
  }
  StreamOperation pending;
  pending.work = streams_->make_work(stream, false);
  StreamWatcher::Place place = streams_->watcher().begin(stream);
  runtime_.record(*pending.work->device.event, stream);
  streams_->set_last(pending.work->device.event, stream);
  pending.context = streams_->watcher().context_of(to_string(op.op));
  pending.limit = Seconds::max();  // the host part enforces the limit
  pending.host = part->host_end();
  pending.keep = {memory};
  Work work(pending.work);
  streams_->watcher().add(std::move(pending), std::move(place));
  return {std::move(work), part};
}

// ---- Messages -------------------------------------------------------------------------------------------------------

std::vector<Work> StagedBackend::enqueue_messages(std::span<const StreamMessage> messages, const StreamCall& call) {
  for (const StreamMessage& one : messages) {
    if (!runtime_.is_capturing({one.device.index, call.stream})) continue;
    throw Unsupported(fmt::format("{}: messages that go through host memory cannot be captured into a CUDA graph",
                                  to_string(one.message->op)));
  }
  Batch batch;
  std::vector<Work> works(messages.size());
  for (const StreamMessage& one : messages) batch.messages.push_back(one.message);
  // Copies all data to send before the stream waits for any receive.
  for (const Op op : {Op::send, Op::recv}) {
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].message->op == op) works[i] = enqueue_message(messages[i], call, batch);
    }
  }
  const auto start = [&host = host_, limit = call.limit,
                      all = std::move(batch.messages)](const std::exception_ptr& error) {
    for (const auto& message : all) {
      if (error) {
        message->error = error;
        message->finished();
        continue;
      }
      message->since = Deadline::Clock::now();
      message->deadline = Deadline::after(limit);
    }
    if (!error) host.start(all, true);
  };
  streams_->watcher().call_after(std::move(batch.copied), std::move(batch.sends), start);
  return works;
}

Work StagedBackend::enqueue_message(const StreamMessage& one, const StreamCall& call, Batch& batch) {
  Message& message = *one.message;
  const bool sends = message.op == Op::send;
  const auto memory = streams_->make_pinned(one.device.index, kWordStride + message.bytes);
  auto* const word = reinterpret_cast<std::uint32_t*>(memory.get());
  clear_word(word);
  std::byte* const on_device = message.data;
  message.data = memory.get() + kWordStride;
  const DeviceStream stream =
      streams_->stream_for({one.device.index, call.stream}, call.async_op,
                           sends ? DeviceStreams::Purpose::sends : DeviceStreams::Purpose::receives);
  StreamOperation pending;
  pending.host = std::make_shared<HostEnd>();
  pending.work = streams_->make_work(stream, false);
  pending.limit = Seconds::max();  // the message enforces the limit
  pending.context = one.context;
  pending.keep = {memory};
  message.waiters = std::shared_ptr<const std::atomic<int>>(pending.work, &pending.work->waiters);
  message.finished = [translate = std::move(message.finished), raw = &message, memory, word, end = pending.host] {
    translate();
    end->end(raw->error);
    set_word(word);
  };
  Work work(pending.work);
  DeviceEnd& end = pending.work->device;
  if (sends) {
    if (message.bytes != 0) runtime_.copy(message.data, on_device, message.bytes, stream);
    batch.copied.push_back(streams_->make_event(one.device.index));
    runtime_.record(*batch.copied.back(), stream);
    batch.sends.push_back(pending.host);
    StreamWatcher::Place place = streams_->watcher().begin(stream);
    runtime_.record(*end.event, stream);
    streams_->watcher().add(std::move(pending), std::move(place));
    return work;
  }
  const auto posted = streams_->make_event(one.device.index);
  runtime_.record(*posted, stream);
  end.arrival = std::make_shared<DeviceArrival>(
      DeviceArrival::Copy{&runtime_, on_device, memory, message.data, message.bytes, word, posted, end.event});
  if (!call.async_op) end.arrival->enqueue(stream);
  streams_->watcher().add_arrival(std::move(pending));
  return work;
}

}  // namespace

std::unique_ptr<Backend> make_staged_backend(Backend& host, std::shared_ptr<DeviceStreams> streams, AbortSignal& abort,
                                             int rank, std::string name) {
  return std::make_unique<StagedBackend>(host, std::move(streams), abort, rank, std::move(name));
}

}  // namespace maniple
