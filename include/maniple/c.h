/* Maniple's communication in C: groups of ranks, collectives, messages. For programs in other languages, or built
 * with another C++ library.
 *
 *   maniple_group* world = NULL;
 *   maniple_error* error = maniple_init(&store, &options, NULL, &world);
 *   if (error == NULL) error = maniple_all_reduce(world, &x, &x, sum, NULL, NULL);
 *   if (error != NULL) { fprintf(stderr, "%s\n", maniple_error_text(error)); maniple_error_free(error); }
 *   maniple_group_free(world);
 *
 * It is the part of maniple/comm/process_group.h that a binding needs. The torch.distributed backend in python/ is
 * built on it, so one libmaniple.so works with every PyTorch.
 *
 * Errors: a function that can fail returns NULL for success, otherwise an error that the caller frees. No C++
 * exception leaves these functions.
 *
 * Work: if the last argument of a collective is NULL, the call returns when this rank's result is in place.
 * Otherwise the call starts the operation, and *work, which the caller frees, reports when it is done. Buffers must
 * stay valid until then. Freeing a work neither waits nor cancels.
 *
 * Ranks, counts, threads, the order of calls and failures: see maniple/comm/process_group.h. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct maniple_group maniple_group;
typedef struct maniple_work maniple_work;
typedef struct maniple_memory maniple_memory;
typedef struct maniple_error maniple_error;

/* Incremented when this file changes incompatibly: programs built against an older number need to be rebuilt. */
#define MANIPLE_C_INTERFACE 2
int maniple_c_interface(void);     /* the number of the library in use */
const char* maniple_version(void); /* "0.1.0" */

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

/* The error classes of maniple/comm/error.h. */
enum {
  MANIPLE_INVALID_ARGUMENT = 0,
  MANIPLE_TIMEOUT = 1,
  MANIPLE_PEER_LOST = 2,
  MANIPLE_ABORTED = 3,
  MANIPLE_MISMATCH = 4,
  MANIPLE_PROTOCOL = 5,
  MANIPLE_SYSTEM = 6,
  MANIPLE_UNSUPPORTED = 7
};

/* For store callbacks. The text is copied. */
maniple_error* maniple_error_new(int kind, const char* text);
int maniple_error_kind(const maniple_error* error);
const char* maniple_error_text(const maniple_error* error); /* valid until the error is freed */
/* Sets *ranks to global ranks, valid until the error is freed, and returns their number. PeerLost: the lost ranks;
 * Timeout: the missing ones. */
size_t maniple_error_ranks(const maniple_error* error, const int** ranks);
void maniple_error_free(maniple_error* error);

/* ---- Store: the caller's key-value store, through which ranks find each other ------------------------------------ */

typedef struct {
  const char* data;
  size_t size;
} maniple_bytes;

/* Passes a value to the library, which copies it. */
typedef void (*maniple_reply)(void* to, const char* data, size_t size);

/* The callbacks may be called from any thread. They must not wait for a key: the library polls. To fail, they return an
 * error made by maniple_error_new. */
typedef struct {
  void* context;
  maniple_error* (*set)(void* context, maniple_bytes key, maniple_bytes value);
  maniple_error* (*get)(void* context, maniple_bytes key, maniple_reply reply, void* to); /* the key exists */
  maniple_error* (*has_all)(void* context, const maniple_bytes* keys, size_t count, int* all);
  maniple_error* (*add)(void* context, maniple_bytes key, int64_t delta, int64_t* sum);
  /* Sets the key to `desired` if it holds `expected`, or is absent and `expected` is empty. Replies with the value that
   * the key holds afterwards. */
  maniple_error* (*compare_set)(void* context, maniple_bytes key, maniple_bytes expected, maniple_bytes desired,
                                maniple_reply reply, void* to);
  maniple_error* (*erase)(void* context, maniple_bytes key, int* existed);
  void (*release)(void* context); /* the last callback; NULL: nothing to release */
  const char* description;        /* for messages: "TCPStore at 10.0.0.1:29500"; copied */
} maniple_store;

/* ---- Groups ------------------------------------------------------------------------------------------------------ */

typedef struct {
  int rank;
  int world_size;
  double timeout_s; /* positive; limit of operations without their own, and of maniple_init (there at most 5 minutes) */
  const char* name; /* the group's name in messages; NULL: "world" */
  /* A host name or address that all ranks reach; data uses the network interface on the route to it. NULL or empty:
   * loopback, for ranks on one host. MANIPLE_INTERFACE overrides it. */
  const char* master;
  /* As InitOptions::backend in maniple/comm/options.h: NULL or "native", "cpu:native,cuda:nccl", ... */
  const char* backend;
  /* This rank's GPU, for a GPU backend. -1: its rank on this host, modulo the number of GPUs. */
  int device;
} maniple_init_options;

typedef struct {
  double timeout_s; /* 0: the group's timeout */
  /* Lets a binding check for signals. In a call without a work, the calling thread calls it several times a second
   * while it sleeps; a result other than 0 ends the operation and the group. NULL: not called. */
  int (*interrupted)(void* context);
  void* context;
  /* For GPU memory: the operation runs in the order of this stream (a cudaStream_t). NULL: the default stream. */
  void* stream;
} maniple_call;

/* Makes this process a rank of a world. The job's secret comes from the launcher (maniple run); without one, a rank
 * creates it and the store passes it on. Takes ownership of the store, even if it fails. Of `call` only `interrupted`
 * and its context are used; it may be NULL. */
maniple_error* maniple_init(const maniple_store* store, const maniple_init_options* options, const maniple_call* call,
                            maniple_group** group);

/* Creates a group from some of the parent's ranks, in the order given. Only these ranks call it, all with the same
 * arguments. `name` must be new: no group of the world may have had it before. timeout_s 0: the parent's timeout. */
maniple_error* maniple_subgroup(maniple_group* parent, const char* name, const int* ranks, size_t count,
                                double timeout_s, maniple_group** group);
void maniple_group_free(maniple_group* group); /* leaves the group; lifetime: see process_group.h */

int maniple_group_rank(const maniple_group* group);
int maniple_group_size(const maniple_group* group);
const char* maniple_group_name(const maniple_group* group);
const char* maniple_group_transport(const maniple_group* group); /* "shm", "tcp", ... */
void maniple_group_abort(maniple_group* group, const char* reason);
/* The first cause if the group has failed, otherwise NULL. The caller frees it. */
maniple_error* maniple_group_error(const maniple_group* group);

/* ---- Operations -------------------------------------------------------------------------------------------------- */

/* As maniple::DType. */
enum {
  MANIPLE_INT8 = 0,
  MANIPLE_INT16 = 1,
  MANIPLE_INT32 = 2,
  MANIPLE_INT64 = 3,
  MANIPLE_UINT8 = 4,
  MANIPLE_FLOAT16 = 5,
  MANIPLE_BFLOAT16 = 6,
  MANIPLE_FLOAT32 = 7,
  MANIPLE_FLOAT64 = 8,
  MANIPLE_BOOL8 = 9
};

/* As maniple::ReduceOp. */
enum {
  MANIPLE_SUM = 0,
  MANIPLE_AVG = 1,
  MANIPLE_PRODUCT = 2,
  MANIPLE_MIN = 3,
  MANIPLE_MAX = 4,
  MANIPLE_BAND = 5,
  MANIPLE_BOR = 6,
  MANIPLE_BXOR = 7,
  MANIPLE_PREMUL_SUM = 8
};

typedef struct {
  int kind;
  double factor; /* for MANIPLE_PREMUL_SUM */
} maniple_reduce_op;

/* As maniple::DeviceType. */
enum { MANIPLE_CPU = 0, MANIPLE_CUDA = 1 };

typedef struct {
  void* data;
  size_t count; /* in elements */
  int dtype;
  int device;       /* MANIPLE_CPU: host memory */
  int device_index; /* MANIPLE_CUDA: the GPU, as this process counts GPUs */
} maniple_buffer;

/* GPU memory: the host never waits. A call without a work returns when the operation is enqueued on the call's stream.
 * A call with a work starts after the work already on that stream, but runs on a stream of the group;
 * maniple_work_order makes other streams wait for it. The work is done when the operation is complete. See
 * maniple/comm/work.h. */

/* `call` may always be NULL. `counts` has one number per rank; NULL: equal parts. */
maniple_error* maniple_broadcast(maniple_group*, const maniple_buffer*, int root, const maniple_call*, maniple_work**);
maniple_error* maniple_reduce(maniple_group*, const maniple_buffer* in, const maniple_buffer* out, int root,
                              maniple_reduce_op, const maniple_call*, maniple_work**);
maniple_error* maniple_all_reduce(maniple_group*, const maniple_buffer* in, const maniple_buffer* out,
                                  maniple_reduce_op, const maniple_call*, maniple_work**);
maniple_error* maniple_all_reduce_coalesced(maniple_group*, const maniple_buffer* buffers, size_t count,
                                            maniple_reduce_op, const maniple_call*, maniple_work**);
maniple_error* maniple_gather(maniple_group*, const maniple_buffer* in, const maniple_buffer* out, int root,
                              const size_t* counts, const maniple_call*, maniple_work**);
maniple_error* maniple_all_gather(maniple_group*, const maniple_buffer* in, const maniple_buffer* out,
                                  const size_t* counts, const maniple_call*, maniple_work**);
maniple_error* maniple_scatter(maniple_group*, const maniple_buffer* in, const maniple_buffer* out, int root,
                               const size_t* counts, const maniple_call*, maniple_work**);
maniple_error* maniple_reduce_scatter(maniple_group*, const maniple_buffer* in, const maniple_buffer* out,
                                      maniple_reduce_op, const size_t* counts, const maniple_call*, maniple_work**);
maniple_error* maniple_all_to_all(maniple_group*, const maniple_buffer* in, const maniple_buffer* out,
                                  const size_t* in_counts, const size_t* out_counts, const maniple_call*,
                                  maniple_work**);
maniple_error* maniple_barrier(maniple_group*, const maniple_call*, maniple_work**);
/* On a timeout, names all missing ranks and leaves the group usable. */
maniple_error* maniple_monitored_barrier(maniple_group*, double timeout_s, const maniple_call*);

/* Messages. `peer` of irecv may be -1 for any rank; maniple_work_source returns the sender. `work` must not be NULL. */
maniple_error* maniple_isend(maniple_group*, const maniple_buffer*, int peer, int tag, const maniple_call*,
                             maniple_work**);
maniple_error* maniple_irecv(maniple_group*, const maniple_buffer*, int peer, int tag, const maniple_call*,
                             maniple_work**);

/* ---- Work -------------------------------------------------------------------------------------------------------- */

int maniple_work_done(const maniple_work* work);
/* Waits at most `seconds` (negative: until the operation is done), and sets *done. Returns the operation's error. */
maniple_error* maniple_work_wait(const maniple_work* work, double seconds, int* done);
/* Orders work enqueued later on the stream (a cudaStream_t) after the operation, without blocking the host. For an
 * operation on host memory: waits until it is done. Returns the operation's error if it has already failed. */
maniple_error* maniple_work_order(const maniple_work* work, void* stream);
/* Calls `callback` once, when the operation is done; at once if it is already done. The callback frees the error, which
 * is NULL after success, and must not wait for operations of the group. */
void maniple_work_on_done(const maniple_work* work, void (*callback)(void* context, maniple_error* error),
                          void* context);
int maniple_work_source(const maniple_work* work); /* irecv that is done: the sender; otherwise -1 */
void maniple_work_free(maniple_work* work);

/* ---- Registered memory: mapped by all ranks of a host, so that collectives copy less ----------------------------- */

/* Collective. GPU memory needs a group with the backend cuda or nccl. */
maniple_error* maniple_allocate(maniple_group*, size_t bytes, int device, int device_index, const maniple_call*,
                                maniple_memory**);
void* maniple_memory_data(const maniple_memory* memory);
void maniple_memory_free(maniple_memory* memory);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
