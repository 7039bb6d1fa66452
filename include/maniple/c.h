/* Maniple's communication for programs that are not C++, or not built with the same C++ library: groups of ranks,
 * collectives, messages.
 *
 * It is the part of maniple/comm/process_group.h that a binding needs, in C. The torch.distributed backend of python/
 * is made of it: so libmaniple.so is built once, whatever PyTorch it is used with.
 *
 *   maniple_group* world = NULL;
 *   maniple_error* error = maniple_init(&store, &options, NULL, &world);
 *   if (error == NULL) error = maniple_all_reduce(world, &x, &x, sum, NULL, NULL);
 *   if (error != NULL) { fprintf(stderr, "%s\n", maniple_error_text(error)); maniple_error_free(error); }
 *   maniple_group_free(world);
 *
 * Errors: a function that can fail returns NULL for success, otherwise an error that the caller frees. No C++ exception
 * leaves it.
 *
 * Work: a collective whose last argument is NULL returns when this rank's result is in place; otherwise it starts, and
 * *work, which the caller frees, tells when it is done. Buffers must stay valid until then. Freeing a work neither
 * waits nor cancels.
 *
 * Ranks, counts, threads, the order of calls and what happens after a failure: as in maniple/comm/process_group.h. */
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

/* Changes with every change of this file that a program built against an older one would not survive. */
#define MANIPLE_C_INTERFACE 2
int maniple_c_interface(void);     /* that of the library */
const char* maniple_version(void); /* "0.1.0" */

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

/* The classes of maniple/comm/error.h. */
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

/* For the callbacks of a store. The text is copied. */
maniple_error* maniple_error_new(int kind, const char* text);
int maniple_error_kind(const maniple_error* error);
const char* maniple_error_text(const maniple_error* error); /* valid as long as the error */
/* PeerLost: the lost ranks; Timeout: the missing ones; counted in the world. Returns their number. */
size_t maniple_error_ranks(const maniple_error* error, const int** ranks);
void maniple_error_free(maniple_error* error);

/* ---- Store: a key-value store of the caller's that all ranks reach, by which they find each other ---------------- */

typedef struct {
  const char* data;
  size_t size;
} maniple_bytes;

/* Hands a value to the library, which copies it. */
typedef void (*maniple_reply)(void* to, const char* data, size_t size);

/* Called from any thread. None may wait for a key: the library asks again. They may fail, with an error of
 * maniple_error_new. */
typedef struct {
  void* context;
  maniple_error* (*set)(void* context, maniple_bytes key, maniple_bytes value);
  maniple_error* (*get)(void* context, maniple_bytes key, maniple_reply reply, void* to); /* of a key that exists */
  maniple_error* (*has_all)(void* context, const maniple_bytes* keys, size_t count, int* all);
  maniple_error* (*add)(void* context, maniple_bytes key, int64_t delta, int64_t* sum);
  /* Sets the key to `desired` if it holds `expected`, or is absent and `expected` is empty; replies with what it holds
   * then. */
  maniple_error* (*compare_set)(void* context, maniple_bytes key, maniple_bytes expected, maniple_bytes desired,
                                maniple_reply reply, void* to);
  maniple_error* (*erase)(void* context, maniple_bytes key, int* existed);
  void (*release)(void* context); /* no callback follows; NULL: nothing to release */
  const char* description;        /* for messages: "TCPStore at 10.0.0.1:29500"; copied */
} maniple_store;

/* ---- Groups ------------------------------------------------------------------------------------------------------ */

typedef struct {
  int rank;
  int world_size;
  double timeout_s; /* of maniple_init, and of every operation that has none of its own; positive */
  const char* name; /* of the group, in messages; NULL: "world" */
  const char*
      master; /* a host name or address that all ranks reach: data goes over the interface that leads there. NULL or
                 empty: loopback, which is right for ranks of one host. MANIPLE_INTERFACE overrides it */
  const char*
      backend; /* as InitOptions::backend in maniple/comm/options.h: NULL or "native", "cpu:native,cuda:nccl", ... */
  int device;  /* the GPU of this rank, where the backend is made for one; -1: its rank on this host, modulo the number
                  of GPUs */
} maniple_init_options;

typedef struct {
  double timeout_s; /* 0: that of the group */
  /* Asked by the thread that made a call without a work while it sleeps in it, some times a second: not 0 ends the
   * operation and the group. So a binding can look for signals. NULL: nobody is asked. */
  int (*interrupted)(void* context);
  void* context;
  /* For memory of a GPU: the stream (a cudaStream_t) in whose order the operation runs. NULL: the default stream. */
  void* stream;
} maniple_call;

/* Makes this process a rank of a world. The job's secret is that of the launcher (maniple run), otherwise one that a
 * rank makes and the store hands to the others. Takes the store, also when it fails. Of `call` only the question
 * counts; it may be NULL. */
maniple_error* maniple_init(const maniple_store* store, const maniple_init_options* options, const maniple_call* call,
                            maniple_group** group);

/* A group of some of the parent's ranks, in the order given. Only these call it, all with the same arguments; `name` is
 * one that no group of the world has had before. */
maniple_error* maniple_subgroup(maniple_group* parent, const char* name, const int* ranks, size_t count,
                                double timeout_s, maniple_group** group);
void maniple_group_free(maniple_group* group); /* leaves it; never waits for other ranks */

int maniple_group_rank(const maniple_group* group);
int maniple_group_size(const maniple_group* group);
const char* maniple_group_name(const maniple_group* group);
const char* maniple_group_transport(const maniple_group* group); /* "shm", "tcp", ... */
void maniple_group_abort(maniple_group* group, const char* reason);
/* The first cause if the group has failed, otherwise NULL. */
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
  double factor; /* of MANIPLE_PREMUL_SUM */
} maniple_reduce_op;

/* As maniple::DeviceType. */
enum { MANIPLE_CPU = 0, MANIPLE_CUDA = 1 };

typedef struct {
  void* data;
  size_t count; /* of elements */
  int dtype;
  int device;       /* MANIPLE_CPU: memory of the host */
  int device_index; /* of MANIPLE_CUDA: the GPU, as this process counts them */
} maniple_buffer;

/* On memory of a GPU the host never waits. A call without a work returns when the operation is enqueued on the stream
 * of the call; one with a work starts after what that stream holds and runs on a stream of the group's own:
 * maniple_work_order makes others wait for it. Its work is done when the operation is complete. See
 * maniple/comm/work.h. */

/* `call` may be NULL everywhere. `counts` has one number for each rank, or is NULL: equal parts. */
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
/* Names all ranks that do not come in time, and leaves the group usable. */
maniple_error* maniple_monitored_barrier(maniple_group*, double timeout_s, const maniple_call*);

/* Messages. `peer` of irecv may be -1: any rank; maniple_work_source says which. `work` must not be NULL. */
maniple_error* maniple_isend(maniple_group*, const maniple_buffer*, int peer, int tag, const maniple_call*,
                             maniple_work**);
maniple_error* maniple_irecv(maniple_group*, const maniple_buffer*, int peer, int tag, const maniple_call*,
                             maniple_work**);

/* ---- Work -------------------------------------------------------------------------------------------------------- */

int maniple_work_done(const maniple_work* work);
/* Waits at most so long (negative: until it is done). The error is that of the operation; *done says whether it is
 * done. */
maniple_error* maniple_work_wait(const maniple_work* work, double seconds, int* done);
/* What is enqueued on the stream (a cudaStream_t) from now on comes after the operation, and the host goes on; of an
 * operation on memory of the host: waits until it is done. The error is one that is known by now. */
maniple_error* maniple_work_order(const maniple_work* work, void* stream);
/* Calls back once, when it is done: at once if it is. The callback frees the error, which is NULL after success, and
 * must not wait for operations of the group. */
void maniple_work_on_done(const maniple_work* work, void (*callback)(void* context, maniple_error* error),
                          void* context);
int maniple_work_source(const maniple_work* work); /* of irecv that is done: the rank that sent it; otherwise -1 */
void maniple_work_free(maniple_work* work);

/* ---- Registered memory: mapped by all ranks of a host, so that collectives copy less ----------------------------- */

/* Collective. Memory of a GPU: only of a group whose backend has an engine for it. */
maniple_error* maniple_allocate(maniple_group*, size_t bytes, int device, int device_index, const maniple_call*,
                                maniple_memory**);
void* maniple_memory_data(const maniple_memory* memory);
void maniple_memory_free(maniple_memory* memory);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
