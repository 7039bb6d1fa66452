// maniple/c.h: collectives, messages, works, registered memory.
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/backend/work_state.h"
#include "comm/capi/handles.h"

namespace maniple {
namespace {

template <class Value>
constexpr bool same(Value value, int number) {
  return static_cast<int>(value) == number;
}
static_assert(same(DType::int8, MANIPLE_INT8) && same(DType::int16, MANIPLE_INT16) &&
              same(DType::int32, MANIPLE_INT32) && same(DType::int64, MANIPLE_INT64) &&
              same(DType::uint8, MANIPLE_UINT8) && same(DType::float16, MANIPLE_FLOAT16) &&
              same(DType::bfloat16, MANIPLE_BFLOAT16) && same(DType::float32, MANIPLE_FLOAT32) &&
              same(DType::float64, MANIPLE_FLOAT64) && same(DType::bool8, MANIPLE_BOOL8));
static_assert(same(ReduceOp::sum, MANIPLE_SUM) && same(ReduceOp::avg, MANIPLE_AVG) &&
              same(ReduceOp::product, MANIPLE_PRODUCT) && same(ReduceOp::min, MANIPLE_MIN) &&
              same(ReduceOp::max, MANIPLE_MAX) && same(ReduceOp::band, MANIPLE_BAND) &&
              same(ReduceOp::bor, MANIPLE_BOR) && same(ReduceOp::bxor, MANIPLE_BXOR) &&
              same(ReduceOp::premul_sum, MANIPLE_PREMUL_SUM));

static_assert(same(DeviceType::cpu, MANIPLE_CPU) && same(DeviceType::cuda, MANIPLE_CUDA));

Device device_from(int device, int index) {
  if (device == MANIPLE_CPU) return {};
  if (device != MANIPLE_CUDA) throw InvalidArgument("device " + std::to_string(device) + " is not one of maniple/c.h");
  if (index < 0 || index > std::numeric_limits<std::int16_t>::max())
    throw InvalidArgument("the index of a GPU is " + std::to_string(index));
  return Device::cuda(index);
}

// Rejects values outside the enumerations, as enumerators index tables.
Buffer buffer_from(const maniple_buffer* buffer) {
  if (buffer->dtype < 0 || buffer->dtype >= kDTypeCount)
    throw InvalidArgument("dtype " + std::to_string(buffer->dtype) + " is not one of maniple/c.h");
  return {buffer->data, buffer->count, static_cast<DType>(buffer->dtype),
          device_from(buffer->device, buffer->device_index)};
}

ReduceOp op_from(const maniple_reduce_op& op) {
  if (op.kind < 0 || op.kind >= ReduceOp::kKindCount)
    throw InvalidArgument("reduce op " + std::to_string(op.kind) + " is not one of maniple/c.h");
  if (op.kind == MANIPLE_PREMUL_SUM) return ReduceOp::premultiplied(op.factor);
  return static_cast<ReduceOp::Kind>(op.kind);
}

std::span<const std::size_t> counts_from(const std::size_t* counts, const maniple_group* group) {
  if (counts == nullptr) return {};
  return {counts, static_cast<std::size_t>(group->group->size())};
}

constexpr SourceLocation kNoPlace;  // a line of this file would not help users

CallOptions options_from(const maniple_call* call, bool async) {
  CallOptions options;
  if (call != nullptr && call->timeout_s != 0) options.timeout = Seconds(call->timeout_s);
  if (call != nullptr) options.stream = call->stream;
  options.async_op = async;
  return options;
}

void require_work(maniple_work** work) {
  if (work == nullptr)
    throw InvalidArgument("a message needs a place for its work; the buffer is in use until it is done");
}

/// Runs `start` with the call's options, and passes its Work to the caller if `work` is not null.
template <class Start>
maniple_error* run(const maniple_call* call, maniple_work** work, Start&& start) noexcept {
  return guarded([&] {
    const CallOptions options = options_from(call, work != nullptr);
    if (work != nullptr) {
      auto handle = std::make_unique<maniple_work>();
      handle->work = start(options);
      *work = handle.release();
    } else {
      const Interrupt interrupt = interrupt_of(call);
      start(options);
    }
  });
}

}  // namespace
}  // namespace maniple

using namespace maniple;

maniple_error* maniple_broadcast(maniple_group* group, const maniple_buffer* buffer, int root, const maniple_call* call,
                                 maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->broadcast(buffer_from(buffer), root, options, kNoPlace);
  });
}

maniple_error* maniple_reduce(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out, int root,
                              maniple_reduce_op op, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->reduce(buffer_from(in), buffer_from(out), root, op_from(op), options, kNoPlace);
  });
}

maniple_error* maniple_all_reduce(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out,
                                  maniple_reduce_op op, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->all_reduce(buffer_from(in), buffer_from(out), op_from(op), options, kNoPlace);
  });
}

maniple_error* maniple_all_reduce_coalesced(maniple_group* group, const maniple_buffer* buffers, size_t count,
                                            maniple_reduce_op op, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    std::vector<Buffer> list;
    for (size_t i = 0; i < count; ++i) list.push_back(buffer_from(&buffers[i]));
    return group->group->all_reduce_coalesced(list, op_from(op), options, kNoPlace);
  });
}

maniple_error* maniple_gather(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out, int root,
                              const size_t* counts, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->gather(buffer_from(in), buffer_from(out), root, counts_from(counts, group), options, kNoPlace);
  });
}

maniple_error* maniple_all_gather(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out,
                                  const size_t* counts, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->all_gather(buffer_from(in), buffer_from(out), counts_from(counts, group), options, kNoPlace);
  });
}

maniple_error* maniple_scatter(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out, int root,
                               const size_t* counts, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->scatter(buffer_from(in), buffer_from(out), root, counts_from(counts, group), options,
                                 kNoPlace);
  });
}

maniple_error* maniple_reduce_scatter(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out,
                                      maniple_reduce_op op, const size_t* counts, const maniple_call* call,
                                      maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->reduce_scatter(buffer_from(in), buffer_from(out), op_from(op), counts_from(counts, group),
                                        options, kNoPlace);
  });
}

maniple_error* maniple_all_to_all(maniple_group* group, const maniple_buffer* in, const maniple_buffer* out,
                                  const size_t* in_counts, const size_t* out_counts, const maniple_call* call,
                                  maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    return group->group->all_to_all(buffer_from(in), buffer_from(out), counts_from(in_counts, group),
                                    counts_from(out_counts, group), options, kNoPlace);
  });
}

maniple_error* maniple_barrier(maniple_group* group, const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) { return group->group->barrier(options, kNoPlace); });
}

maniple_error* maniple_monitored_barrier(maniple_group* group, double timeout_s, const maniple_call* call) {
  return guarded([&] {
    const Interrupt interrupt = interrupt_of(call);
    group->group->monitored_barrier(Seconds(timeout_s), options_from(nullptr, false), kNoPlace);
  });
}

maniple_error* maniple_isend(maniple_group* group, const maniple_buffer* buffer, int peer, int tag,
                             const maniple_call* call, maniple_work** work) {
  return run(call, work, [&](const CallOptions& options) {
    require_work(work);
    return group->group->isend(buffer_from(buffer), peer, tag, options, kNoPlace);
  });
}

maniple_error* maniple_irecv(maniple_group* group, const maniple_buffer* buffer, int peer, int tag,
                             const maniple_call* call, maniple_work** work) {
  auto source = std::make_shared<int>(-1);
  maniple_error* error = run(call, work, [&](const CallOptions& options) {
    require_work(work);
    Work started = group->group->irecv(buffer_from(buffer), peer, tag, source.get(), options, kNoPlace);
    when_done(started, [source](const std::exception_ptr&) {});  // keeps `source` alive even if the work is freed first
    return started;
  });
  if (error == nullptr) (*work)->source = std::move(source);
  return error;
}

int maniple_work_done(const maniple_work* work) { return work->work.done() ? 1 : 0; }

maniple_error* maniple_work_wait(const maniple_work* work, double seconds, int* done) {
  *done = 0;
  return guarded([&] {
    const Deadline limit = seconds < 0 ? Deadline::never() : Deadline::after(Seconds(seconds));
    try {
      *done = work->work.wait_until(limit) ? 1 : 0;
    } catch (...) {
      *done = 1;
      throw;
    }
  });
}

maniple_error* maniple_work_order(const maniple_work* work, void* stream) {
  return guarded([&] {
    if (work->work.state()->device.runtime == nullptr) return work->work.synchronize();
    order_after(work->work, stream);
  });
}

void maniple_work_on_done(const maniple_work* work, void (*callback)(void* context, maniple_error* error),
                          void* context) {
  when_done(work->work, [callback, context](const std::exception_ptr& error) { callback(context, error_of(error)); });
}

int maniple_work_source(const maniple_work* work) {
  return work->source != nullptr && work->work.done() ? *work->source : -1;
}

void maniple_work_free(maniple_work* work) { delete work; }

maniple_error* maniple_allocate(maniple_group* group, size_t bytes, int device, int device_index,
                                const maniple_call* call, maniple_memory** memory) {
  return guarded([&] {
    const Device where = device_from(device, device_index);
    const CallOptions options = options_from(call, false);
    *memory = new maniple_memory{where.is_cpu() ? group->group->allocate(bytes, options, kNoPlace)
                                                : group->group->allocate(bytes, where, options, kNoPlace)};
  });
}

void* maniple_memory_data(const maniple_memory* memory) { return memory->memory.data(); }
void maniple_memory_free(maniple_memory* memory) { delete memory; }
