#include "comm/transport/mesh.h"

#include <new>

#include "comm/base/check.h"
#include "comm/transport/sealed_channel.h"

namespace maniple {
namespace {
constexpr std::size_t kScratchAlignment = 64;
}  // namespace

Mesh::Mesh(MeshOptions options)
    : options_(std::move(options)), channel_options_(tcp_channel_options()), waiter_(options_.waiting) {
  const auto ranks = std::ssize(options_.global_ranks);
  MANIPLE_ASSERT(options_.rank >= 0 && options_.rank < ranks && options_.abort != nullptr);
  senders_.resize(ranks);
  receivers_.resize(ranks);
}

FrameSender& Mesh::sender(int rank) {
  auto& sender = senders_[rank];
  if (!sender) {
    sender = std::make_unique<FrameSender>(
        peer(rank), options_.streams, [this, rank](int stream, Deadline deadline) -> std::unique_ptr<ByteSink> {
          if (stream == 0 && options_.local_sink) {
            if (auto sink = options_.local_sink(rank)) return sink;
          }
          const std::string topic = options_.topic + "/" + std::to_string(stream);
          return make_data_sink(options_.connector->dial(peer(rank).global_rank, topic, deadline, *options_.abort),
                                channel_options_);
        });
  }
  if (rank < options_.rank && sender->can_move()) move(rank);
  return *sender;
}

void Mesh::move(int rank) {
  const FrameReceiver* const receiver = receivers_[rank].get();
  const int fd = receiver == nullptr ? -1 : receiver->connection();
  if (fd >= 0) senders_[rank]->move_to(make_tcp_sink(duplicate(fd), channel_options_));
}

FrameReceiver& Mesh::receiver(int rank) {
  auto& receiver = receivers_[rank];
  if (!receiver) {
    receiver = std::make_unique<FrameReceiver>(peer(rank), [this, rank](int stream) -> std::unique_ptr<ByteSource> {
      if (stream == FrameReceiver::kOwnConnection) {
        const FrameSender* const own = senders_[rank].get();
        const int fd = own == nullptr ? -1 : own->connection();
        return fd < 0 ? nullptr : make_tcp_source(duplicate(fd), channel_options_);
      }
      if (stream == 0 && options_.local_source) {
        if (auto source = options_.local_source(rank)) return source;
      }
      SecureConnection connection =
          options_.connector->try_take(peer(rank).global_rank, options_.topic + "/" + std::to_string(stream));
      return connection ? make_data_source(std::move(connection), channel_options_) : nullptr;
    });
  }
  return *receiver;
}

std::span<std::byte> Mesh::scratch(std::size_t bytes) {
  if (bytes > scratch_bytes_) {
    const std::size_t rounded = (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    scratch_.reset();
    scratch_bytes_ = 0;
    scratch_.reset(static_cast<std::byte*>(std::aligned_alloc(kScratchAlignment, rounded)));
    if (!scratch_) throw std::bad_alloc();
    scratch_bytes_ = rounded;
  }
  return {scratch_.get(), bytes};
}

}  // namespace maniple
