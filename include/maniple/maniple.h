// Everything: communication, operations on tensors, training. Needs LibTorch; <maniple/comm.h> does not.
#pragma once

#include <maniple/comm.h>
#include <maniple/dist.h>
#include <maniple/train/accumulation.h>
#include <maniple/train/checkpoint.h>
#include <maniple/train/cifar10.h>
#include <maniple/train/clip_grad.h>
#include <maniple/train/comm_hooks.h>
#include <maniple/train/data_parallel.h>
#include <maniple/train/ddp.h>
#include <maniple/train/int8_hook.h>
#include <maniple/train/lr_scheduler.h>
#include <maniple/train/metrics.h>
#include <maniple/train/mnist.h>
#include <maniple/train/optim.h>
#include <maniple/train/post_local_sgd.h>
#include <maniple/train/power_sgd.h>
#include <maniple/train/prefetch.h>
#include <maniple/train/progress.h>
#include <maniple/train/sampler.h>
#include <maniple/train/stop.h>
#include <maniple/train/summary_writer.h>
#include <maniple/train/sync_batch_norm.h>
#include <maniple/train/text.h>
#include <maniple/train/torch_settings.h>
#include <maniple/train/uneven_inputs.h>
