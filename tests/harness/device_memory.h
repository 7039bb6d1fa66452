// Memory for tests. MANIPLE_TEST_DEVICE=cuda runs the host operations' tests on GPU memory.
#pragma once

#include <cstddef>
#include <memory>

#include <maniple/comm/types.h>

namespace maniple::harness {

/// The device of the tests' buffers: cpu if MANIPLE_TEST_DEVICE is unset.
Device test_device();

/// Memory that the host can access, and also the GPU if test_device() is a GPU (managed memory).
std::shared_ptr<std::byte> test_memory(std::size_t bytes);

/// Waits for all work that this process has enqueued on the GPU; does nothing on the CPU.
void synchronize_device();

}  // namespace maniple::harness
