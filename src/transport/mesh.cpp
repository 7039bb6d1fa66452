#include "transport/mesh.h"

#include <new>

#include "base/check.h"
#include "transport/mesh_state.h"
#include "transport/sealed_channel.h"

namespace maniple {
namespace {
constexpr std::size_t kScratchAlignment = 64;
}

Mesh::Mesh(MeshOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Mesh::~Mesh() = default;
int Mesh::rank() const noexcept { return impl_->options.rank; }
int Mesh::size() const noexcept { return static_cast<int>(impl_->options.global_ranks.size()); }

Mesh::Impl::Impl(MeshOptions mesh_options) : options(std::move(mesh_options)) {
  const std::size_t ranks = options.global_ranks.size();
  MANIPLE_ASSERT(options.rank >= 0 && static_cast<std::size_t>(options.rank) < ranks && options.abort != nullptr);
  channel_options = tcp_channel_options();
  senders.resize(ranks);
  receivers.resize(ranks);
}

SendLane& Mesh::Impl::sender(int rank) {
  auto& lane = senders[static_cast<std::size_t>(rank)];
  if (!lane) {
    lane = std::make_unique<SendLane>(
        peer(rank), options.streams, [this, rank](int stream, Deadline deadline) -> std::unique_ptr<ByteSink> {
          if (stream == 0 && options.local_sink) {
            if (auto sink = options.local_sink(rank)) return sink;
          }
          const std::string topic = options.lane + "/" + std::to_string(stream);
          return make_data_sink(options.connector->dial(peer(rank).global_rank, topic, deadline, *options.abort),
                               channel_options);
        });
  }
  return *lane;
}

RecvLane& Mesh::Impl::receiver(int rank) {
  auto& lane = receivers[static_cast<std::size_t>(rank)];
  if (!lane) {
    lane = std::make_unique<RecvLane>(peer(rank), [this, rank](int stream) -> std::unique_ptr<ByteSource> {
      if (stream == 0 && options.local_source) {
        if (auto source = options.local_source(rank)) return source;
      }
      SecureConnection socket =
          options.connector->try_take(peer(rank).global_rank, options.lane + "/" + std::to_string(stream));
      return socket ? make_data_source(std::move(socket), channel_options) : nullptr;
    });
  }
  return *lane;
}

std::span<std::byte> Mesh::Impl::scratch(std::size_t bytes) {
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
