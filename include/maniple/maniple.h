// Everything: communication, the tensor verbs, training. Needs LibTorch; <maniple/comm.h> does not.
#pragma once

#include <maniple/comm.h>
#include <maniple/dist.h>
#include <maniple/train/comm_hooks.h>
#include <maniple/train/ddp.h>
#include <maniple/train/seed.h>
