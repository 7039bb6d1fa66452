#include "backend/plugin/mpi/mpi_channel.h"

#include <algorithm>
#include <cstring>

namespace maniple::mpi_engine {
namespace {

constexpr std::size_t kPackets = 4;
constexpr int kLooks = 64;  // in vain, one after the other, until farewells are looked for: some milliseconds

/// Counts looks in vain.
class Vain {
 public:
  void found() noexcept { looks_ = 0; }
  void look(const Course& course) {
    if (++looks_ % kLooks == 0) Farewells::get().look();
    course.line.check(course.lane);
  }

 private:
  int looks_ = 0;
};

class Sink final : public ByteSink {
 public:
  explicit Sink(const Course& course) : course_(course) {
    for (auto& packet : packets_) packet = std::make_shared<Packet>();
  }

  std::size_t write_some(std::span<const iovec> parts) override {
    course_.line.check(course_.lane);
    Packet& packet = *packets_[next_];
    if (packet.under_way.load(std::memory_order_acquire)) {
      Runtime::get().sweep();
      if (packet.under_way.load(std::memory_order_acquire)) {
        vain_.look(course_);
        return 0;
      }
    }
    std::size_t size = 0;
    for (const iovec& part : parts) {
      const std::size_t take = std::min(part.iov_len, Packet::kBytes - size);
      if (take > 0) std::memcpy(packet.bytes.get() + size, part.iov_base, take);
      size += take;
    }
    if (size == 0) return 0;
    Runtime::get().send(packets_[next_], size, course_.peer, course_.tag, course_.communicator);
    course_.line.sent[course_.lane] += size;
    vain_.found();
    next_ = (next_ + 1) % kPackets;
    return size;
  }
  int fd() const noexcept override { return -1; }

 private:
  Course course_;
  Vain vain_;
  std::array<std::shared_ptr<Packet>, kPackets> packets_;
  std::size_t next_ = 0;
};

class Source final : public ByteSource {
 public:
  explicit Source(const Course& course) : course_(course) {}
  ~Source() override {
    if (receiving_) Runtime::get().keep(packet_);
  }

  std::size_t read_some(std::span<const iovec> parts) override {
    if (used_ == size_ && !receive()) {
      vain_.look(course_);
      return 0;
    }
    std::size_t moved = 0;
    for (const iovec& part : parts) {
      const std::size_t take = std::min(part.iov_len, size_ - used_);
      if (take > 0) std::memcpy(part.iov_base, packet_->bytes.get() + used_, take);
      used_ += take;
      moved += take;
    }
    return moved;
  }
  int fd() const noexcept override { return -1; }

 private:
  // Only what has come is received, so nothing is posted that a later end would have to take back.
  bool receive() {
    const auto call = Runtime::get().enter();
    if (!receiving_) {
      int come = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check(MPI_Improbe(course_.peer, course_.tag, course_.communicator, &come, &message, &status), "MPI_Improbe");
      if (come == 0) return false;
      int size = 0;
      MPI_Get_count(&status, MPI_BYTE, &size);
      if (size <= 0 || static_cast<std::size_t>(size) > Packet::kBytes)
        throw ProtocolError("a packet of impossible length");
      coming_ = static_cast<std::size_t>(size);
      check(MPI_Imrecv(packet_->bytes.get(), size, MPI_BYTE, &message, &packet_->request), "MPI_Imrecv");
      receiving_ = true;
    }
    int done = 0;
    check(MPI_Test(&packet_->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) return false;
    receiving_ = false;
    course_.line.received[course_.lane] += coming_;
    vain_.found();
    size_ = coming_;
    used_ = 0;
    return true;
  }

  Course course_;
  Vain vain_;
  std::shared_ptr<Packet> packet_ = std::make_shared<Packet>();
  bool receiving_ = false;
  std::size_t coming_ = 0;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
};

}  // namespace

std::unique_ptr<ByteSink> make_sink(const Course& course) { return std::make_unique<Sink>(course); }
std::unique_ptr<ByteSource> make_source(const Course& course) { return std::make_unique<Source>(course); }

}  // namespace maniple::mpi_engine
