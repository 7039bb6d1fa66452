// Memory for tests of operations on a GPU: MANIPLE_TEST_DEVICE=cuda runs the tests of the host's operations on it.
#pragma once

#include <cstddef>
#include <memory>

#include <maniple/comm/types.h>

namespace maniple::harness {

/// The device whose memory the buffers of tests are: cpu if MANIPLE_TEST_DEVICE is unset.
Device test_device();

/// Memory that the host reaches, and the GPU as well where test_device() is one (managed memory).
std::shared_ptr<std::byte> test_memory(std::size_t bytes);

/// Waits for all that this process has enqueued on the GPU; nothing on the CPU.
void synchronize_device();

}  // namespace maniple::harness
