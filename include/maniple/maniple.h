// All of Maniple: communication, tensor operations, training. Needs LibTorch; <maniple/comm.h> does not.
//
//   maniple::init_process_group();
//   maniple::DistributedDataParallel ddp(net);            // then train as in one process: ddp averages the gradients
//
// Each header below is the manual of its part.
#pragma once

#include <maniple/comm.h>
#include <maniple/dist.h>
#include <maniple/train/accumulation.h>
#include <maniple/train/activation_checkpoint.h>
#include <maniple/train/amp.h>
#include <maniple/train/checkpoint.h>
#include <maniple/train/cifar10.h>
#include <maniple/train/clip_grad.h>
#include <maniple/train/comm_hooks.h>
#include <maniple/train/csv.h>
#include <maniple/train/data_loader.h>
#include <maniple/train/data_parallel.h>
#include <maniple/train/ddp.h>
#include <maniple/train/fully_sharded.h>
#include <maniple/train/int8_hook.h>
#include <maniple/train/lr_scheduler.h>
#include <maniple/train/metrics.h>
#include <maniple/train/mnist.h>
#include <maniple/train/optim.h>
#include <maniple/train/pipeline.h>
#include <maniple/train/placement.h>
#include <maniple/train/post_local_sgd.h>
#include <maniple/train/power_sgd.h>
#include <maniple/train/prefetch.h>
#include <maniple/train/progress.h>
#include <maniple/train/sampler.h>
#include <maniple/train/shard_of.h>
#include <maniple/train/sharded_checkpoint.h>
#include <maniple/train/sharded_optimizer.h>
#include <maniple/train/stop.h>
#include <maniple/train/strategy.h>
#include <maniple/train/summary_writer.h>
#include <maniple/train/sync_batch_norm.h>
#include <maniple/train/tensor_layout.h>
#include <maniple/train/tensor_parallel.h>
#include <maniple/train/text.h>
#include <maniple/train/torch_settings.h>
#include <maniple/train/trainer.h>
#include <maniple/train/uneven_inputs.h>
#include <maniple/train/weights.h>
