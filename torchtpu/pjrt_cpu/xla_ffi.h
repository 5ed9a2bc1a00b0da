/* What a kernel needs of XLA's foreign function interface (FFI), so that no XLA header is needed to build.
 *
 * Names and layouts are those of xla/ffi/api/c_api.h, API 0.x, without the prefix XLA_FFI_. Structs grow at their end
 * only, and the function table says how long it is. Functions that are not called are counted, not named. */
#ifndef TPUGATE_XLA_FFI_H
#define TPUGATE_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

typedef struct FfiError FfiError;   /* made by FfiApi.error_create, freed by XLA */
typedef struct FfiFuture FfiFuture; /* completes a call that goes on after its handler returned */
typedef struct FfiContext FfiContext;

enum { FFI_INT32 = 4, FFI_FLOAT32 = 11, FFI_BFLOAT16 = 16 };
enum { FFI_STAGE_EXECUTE = 3 };
enum { FFI_ERROR_INVALID_ARGUMENT = 3, FFI_ERROR_RESOURCE_EXHAUSTED = 8 };
enum { FFI_EXTENSION_METADATA = 1 };

typedef struct FfiExtension {
  size_t struct_size;
  int type;
  struct FfiExtension *next;
} FfiExtension;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int major;
  int minor;
} FfiVersion;

/* The question that registration asks of a handler, as an extension of its first call frame. */
typedef struct {
  FfiExtension base;
  struct {
    size_t struct_size;
    FfiVersion version;
    uint32_t traits;
  } *metadata;
} FfiMetadataExtension;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int type;
  void *data;
  int64_t rank;
  int64_t *dims;
} FfiBuffer;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int64_t size;
  int *types;
  FfiBuffer **buffers;
} FfiBuffers;

typedef struct { size_t struct_size; FfiExtension *extensions; const char *message; int code; } FfiErrorCreateArgs;
typedef struct { size_t struct_size; FfiExtension *extensions; FfiFuture *future; } FfiFutureArgs;
typedef struct {
  size_t struct_size; FfiExtension *extensions; FfiContext *context; void (*task)(void *); void *data;
} FfiScheduleArgs;
typedef struct { size_t struct_size; FfiExtension *extensions; FfiContext *context; int64_t *num_threads; } FfiNumThreadsArgs;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  FfiVersion version;
  const void *internal;
  FfiError *(*error_create)(FfiErrorCreateArgs *);
  void *message_to_memory_free[10];
  FfiError *(*thread_pool_schedule)(FfiScheduleArgs *);
  FfiError *(*thread_pool_num_threads)(FfiNumThreadsArgs *);
  FfiError *(*future_create)(FfiFutureArgs *);
  FfiError *(*future_set_available)(FfiFutureArgs *);
} FfiApi;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  const FfiApi *api;
  FfiContext *context;
  int stage;
  FfiBuffers arguments;
  FfiBuffers results;
  struct { size_t struct_size; FfiExtension *extensions; int64_t size; void *types, *names, *values; } attributes;
  FfiFuture *future; /* out */
} FfiCallFrame;

typedef FfiError *FfiHandler(FfiCallFrame *);

_Static_assert(offsetof(FfiApi, error_create) == 48, "XLA_FFI_Error_Create is function 0");
_Static_assert(offsetof(FfiApi, thread_pool_schedule) == 136, "XLA_FFI_ThreadPool_Schedule is function 11");
_Static_assert(offsetof(FfiCallFrame, future) == 168, "XLA_FFI_CallFrame.future follows the attributes");

/* The handlers of the custom calls of the same names, see attention.c and linear.c. */
FfiHandler tpugate_paged_attention, tpugate_linear;

/* Whether this processor and this system let tpugate_linear run: asks the system for it. */
int has_matrix_units(void);

#endif
