// Dividing work that is given for the whole job among its processes.
//
// A program on 8 ranks with a batch of 256 trains as one process with a batch of 256 does, if each rank takes 32.
#pragma once

#include <cstddef>

namespace maniple {

/// The batch of one process, so that all together take `global_batch` samples in a step. Throws InvalidArgument when it is no
/// multiple of `world_size`: rounding would silently change the batch, and with it the learning rate that fits. The text names
/// the nearest sizes that work.
std::size_t per_process_batch_size(std::size_t global_batch, int world_size);

/// The loader's workers of one process: `total_workers` over `world_size`, rounded up, so that nobody is left without one
/// unless there are to be none at all (0: the loop itself reads the data).
std::size_t per_process_workers(std::size_t total_workers, int world_size);

}  // namespace maniple
