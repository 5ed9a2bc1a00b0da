/* Presents XLA's CPU plugin to TorchTPU as its one TPU.
 *
 *   TorchTPU --TPU_LIBRARY_PATH--> this library --TPUGATE_PJRT_PLUGIN--> XLA's CPU plugin
 *
 * The plugin's function table is copied; the copy differs in three places, where a TPU client and a CPU plugin disagree:
 *   Client_Create       the caller's options are known to libtpu alone; the plugin gets cpu_device_count = 1 instead
 *   OutputMemoryKinds   the plugin does not implement it; every output lies in "device" memory
 *   extension list      one extension more: the topology of a single chip with a single core
 *
 * A plugin that takes custom calls also gets ours: what a Pallas kernel is on a TPU, attention.c and linear.c are here.
 *
 * Only what these need is declared here, so no XLA header is needed to build. PJRT promises that a struct grows at its
 * end within a major version; every struct says how long it is, and that is checked before a field is read or written.
 * Nothing aborts: a plugin that does not fit makes GetPjrtApi return NULL, with the reason on stderr and in
 * tpugate_pjrt_error(). Whoever loads this library must ask that first, because TorchTPU does not expect NULL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla_ffi.h"

#define PLUGIN_VARIABLE "TPUGATE_PJRT_PLUGIN"
#define SUPPORTED_MAJOR 0
#define END_OF(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))
#define HAS(args, type, field) ((args) && (args)->struct_size >= END_OF(type, field))

typedef struct Error Error; /* made and freed by the plugin */

typedef struct Extension {
  size_t struct_size;
  int type;
  struct Extension *next;
} Extension;

typedef struct {
  size_t struct_size;
  Extension *extensions;
  int major;
  int minor;
} Version;

typedef struct {
  size_t struct_size;
  Extension *extensions;
  const char *name;
  size_t name_size;
  int type;
  int64_t value; /* a union in PJRT; eight bytes for each kind */
  size_t value_size;
} NamedValue;
enum { NAMED_VALUE_INT64 = 1 };

typedef struct {
  size_t struct_size;
  Extension *extensions;
  const NamedValue *options;
  size_t num_options;
} ClientCreateArgs; /* its beginning */

typedef struct {
  size_t struct_size;
  Extension *extensions;
  void *executable;
  size_t num_outputs;
} NumOutputsArgs;

typedef struct {
  size_t struct_size;
  Extension *extensions;
  void *executable;
  size_t num_outputs;
  const char *const *kinds;
  const size_t *kind_sizes;
} OutputMemoryKindsArgs;

/* The function table: functions that are only copied are counted, not named. */
typedef struct {
  size_t struct_size;
  Extension *extensions;
  Version version;
  void *error_plugin_event[10];
  Error *(*client_create)(ClientCreateArgs *);
  void *client_to_executable[33];
  Error *(*num_outputs)(NumOutputsArgs *);
  void *code_size_and_cost[2];
  Error *(*output_memory_kinds)(OutputMemoryKindsArgs *);
} Api;

_Static_assert(sizeof(void *) == 8, "the layouts below are those of a 64-bit machine");
_Static_assert(offsetof(Api, client_create) == 120, "PJRT_Client_Create is function 10");
_Static_assert(offsetof(Api, num_outputs) == 392, "PJRT_Executable_NumOutputs is function 44");
_Static_assert(offsetof(Api, output_memory_kinds) == 416, "PJRT_Executable_OutputMemoryKinds is function 47");

static const Api *plugin;
static Api *patched;
static char failure[1024];
static pthread_once_t once = PTHREAD_ONCE_INIT;

__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(failure, sizeof failure, format, values);
  va_end(values);
  fprintf(stderr, "tpugate pjrt shim: %s\n", failure);
}

/* ---- Client_Create ---- */

static Error *client_create(ClientCreateArgs *args) {
  /* Args that are too short go on as they are: the plugin then answers with a PJRT error, which we could not make. */
  if (!HAS(args, ClientCreateArgs, num_options)) return plugin->client_create(args);
  const NamedValue one_device = {
      .struct_size = END_OF(NamedValue, value_size),
      .name = "cpu_device_count",
      .name_size = sizeof "cpu_device_count" - 1,
      .type = NAMED_VALUE_INT64,
      .value = 1,
      .value_size = 1,
  };
  const NamedValue *options = args->options;
  size_t num_options = args->num_options;
  args->options = &one_device;
  args->num_options = 1;
  Error *error = plugin->client_create(args);
  args->options = options;
  args->num_options = num_options;
  return error;
}

/* ---- Executable_OutputMemoryKinds ---- */

/* The arrays belong to the executable in PJRT, and may be read for as long as it lives. All executables share one table
 * here; it is replaced by a longer one when needed and the old one is kept, so what was handed out stays valid. */
static struct {
  size_t capacity;
  const char **names;
  size_t *sizes;
} kinds;
static pthread_mutex_t kinds_lock = PTHREAD_MUTEX_INITIALIZER;

static int reserve_kinds(size_t needed) {
  if (needed <= kinds.capacity) return 1;
  size_t capacity = kinds.capacity ? kinds.capacity : 256;
  while (capacity < needed) capacity *= 2;
  const char **names = malloc(capacity * sizeof *names);
  size_t *sizes = malloc(capacity * sizeof *sizes);
  if (!names || !sizes) {
    free(names);
    free(sizes);
    return 0;
  }
  for (size_t i = 0; i < capacity; i++) {
    names[i] = "device";
    sizes[i] = sizeof "device" - 1;
  }
  kinds.capacity = capacity;
  kinds.names = names;
  kinds.sizes = sizes;
  return 1;
}

static Error *output_memory_kinds(OutputMemoryKindsArgs *args) {
  if (!HAS(args, OutputMemoryKindsArgs, kind_sizes)) return plugin->output_memory_kinds(args);
  NumOutputsArgs outputs = {.struct_size = END_OF(NumOutputsArgs, num_outputs), .executable = args->executable};
  Error *error = plugin->num_outputs(&outputs);
  if (error) return error;
  pthread_mutex_lock(&kinds_lock);
  int reserved = reserve_kinds(outputs.num_outputs);
  args->kinds = kinds.names;
  args->kind_sizes = kinds.sizes;
  pthread_mutex_unlock(&kinds_lock);
  if (!reserved) return plugin->output_memory_kinds(args); /* out of memory: the plugin's own refusal */
  args->num_outputs = outputs.num_outputs;
  return NULL;
}

/* ---- The topology extension: one process, one chip, one core, at the origin ---- */

enum { TOPOLOGY_EXTENSION_TYPE = 16, NUM_TOPOLOGY_FUNCTIONS = 31, NUM_DIMENSIONS = 3 };
typedef Error *(*TopologyFunction)(void *);

/* Unlike the args above, these have no extension list after their size. */
typedef struct { size_t struct_size; const void *topology; int32_t count; } CountArgs;
typedef struct { size_t struct_size; const void *topology; int32_t max; int32_t *ids; size_t num_ids; } ProcessIdsArgs;
typedef struct {
  size_t struct_size; const void *topology; int32_t process; int32_t max; int32_t *ids; size_t num_ids;
} DeviceIdsArgs;
typedef struct { size_t struct_size; const void *topology; int32_t of; int32_t process; int32_t index; } ProcessOfArgs;
typedef struct {
  size_t struct_size; const void *topology; int32_t of; size_t max; int32_t *at; size_t num_dims; int32_t index;
} PlaceArgs;
typedef struct { size_t struct_size; const void *topology; const int32_t *at; size_t num_dims; int32_t chip; } ChipAtArgs;
typedef struct {
  size_t struct_size; const void *topology; const int32_t *at; size_t num_dims; int32_t index; int32_t device;
} DeviceAtArgs;
typedef struct { size_t struct_size; const void *topology; size_t max; int32_t *bounds; size_t num_dims; } BoundsArgs;

/* A function this chip does not have, or args of another layout. Only the plugin can make a PJRT error: ask for one. */
static Error *unsupported(void *args) {
  (void)args;
  fprintf(stderr, "tpugate pjrt shim: the CPU device does not have a TPU topology function that was called\n");
  NumOutputsArgs too_short = {.struct_size = 0};
  return plugin->num_outputs(&too_short);
}

static size_t fill(int32_t *values, size_t max, int32_t value) {
  size_t count = max < NUM_DIMENSIONS ? max : NUM_DIMENSIONS;
  for (size_t i = 0; i < count; i++) values[i] = value;
  return count;
}

static Error *count_is_one(void *raw) {
  CountArgs *args = raw;
  if (!HAS(args, CountArgs, count)) return unsupported(raw);
  args->count = 1;
  return NULL;
}

static Error *process_ids(void *raw) {
  ProcessIdsArgs *args = raw;
  if (!HAS(args, ProcessIdsArgs, num_ids) || args->max < 1) return unsupported(raw);
  args->ids[0] = 0;
  args->num_ids = 1;
  return NULL;
}

static Error *device_ids(void *raw) {
  DeviceIdsArgs *args = raw;
  if (!HAS(args, DeviceIdsArgs, num_ids) || args->max < 1) return unsupported(raw);
  args->ids[0] = 0;
  args->num_ids = 1;
  return NULL;
}

static Error *process_of(void *raw) {
  ProcessOfArgs *args = raw;
  if (!HAS(args, ProcessOfArgs, index)) return unsupported(raw);
  args->process = args->index = 0;
  return NULL;
}

static Error *process_place(void *raw) {
  PlaceArgs *args = raw;
  if (!HAS(args, PlaceArgs, num_dims)) return unsupported(raw);
  args->num_dims = fill(args->at, args->max, 0);
  return NULL;
}

static Error *device_place(void *raw) {
  PlaceArgs *args = raw;
  if (!HAS(args, PlaceArgs, index)) return unsupported(raw);
  args->index = 0;
  return process_place(raw);
}

static Error *chip_at(void *raw) {
  ChipAtArgs *args = raw;
  if (!HAS(args, ChipAtArgs, chip)) return unsupported(raw);
  args->chip = 0;
  return NULL;
}

static Error *device_at(void *raw) {
  DeviceAtArgs *args = raw;
  if (!HAS(args, DeviceAtArgs, device)) return unsupported(raw);
  args->device = 0;
  return NULL;
}

static Error *bounds_are_one(void *raw) {
  BoundsArgs *args = raw;
  if (!HAS(args, BoundsArgs, num_dims)) return unsupported(raw);
  args->num_dims = fill(args->bounds, args->max, 1);
  return NULL;
}

static struct {
  Extension base;
  TopologyFunction functions[NUM_TOPOLOGY_FUNCTIONS];
} topology;

static void add_topology(Api *api) {
  static const struct { int first, last; TopologyFunction function; } known[] = {
      {7, 15, count_is_one}, {16, 16, process_ids}, {17, 17, device_ids}, {18, 19, process_of},
      {20, 20, process_place}, {21, 21, chip_at}, {22, 22, device_at}, {23, 23, device_place},
      {24, 26, bounds_are_one},
  };
  topology.base = (Extension){sizeof topology, TOPOLOGY_EXTENSION_TYPE, api->extensions};
  for (int i = 0; i < NUM_TOPOLOGY_FUNCTIONS; i++) topology.functions[i] = unsupported;
  for (size_t k = 0; k < sizeof known / sizeof *known; k++)
    for (int i = known[k].first; i <= known[k].last; i++) topology.functions[i] = known[k].function;
  api->extensions = &topology.base;
}

/* ---- Custom calls ---- */

enum { FFI_EXTENSION_TYPE = 5 };

typedef struct {
  size_t struct_size;
  const char *name;
  size_t name_size;
  FfiHandler *handler;
  const char *platform;
  size_t platform_size;
  int traits;
} RegisterArgs;

typedef struct {
  Extension base;
  void *types_and_user_data[2];
  Error *(*register_handler)(RegisterArgs *);
} FfiRegistry;

static int has_attention, has_linear;

static int register_kernel(const FfiRegistry *registry, const char *name, FfiHandler *handler) {
  static const char platform[] = "Host";
  RegisterArgs args = {.struct_size = END_OF(RegisterArgs, traits), .name = name, .name_size = strlen(name)};
  args.handler = handler, args.platform = platform, args.platform_size = sizeof platform - 1;
  return !registry->register_handler(&args);
}

static void register_kernels(const Api *api) {
  for (const Extension *at = api->extensions; at; at = at->next) {
    const FfiRegistry *registry = (const FfiRegistry *)at;
    if (at->type != FFI_EXTENSION_TYPE || at->struct_size < END_OF(FfiRegistry, register_handler)) continue;
    has_attention = register_kernel(registry, "tpugate_paged_attention", tpugate_paged_attention);
    has_linear = has_matrix_units() && register_kernel(registry, "tpugate_linear", tpugate_linear);
    return;
  }
}

/* ---- Loading ---- */

static int fits(const char *path, const Api *api) {
  if (!api) {
    fail("%s: GetPjrtApi returned nothing", path);
  } else if (api->struct_size < END_OF(Api, version)) {
    fail("%s: its PJRT function table is %zu bytes long and holds no version", path, api->struct_size);
  } else if (api->version.struct_size < END_OF(Version, minor)) {
    fail("%s: its PJRT version record is %zu bytes long, %zu are needed", path, api->version.struct_size,
         END_OF(Version, minor));
  } else if (api->version.major != SUPPORTED_MAJOR) {
    fail("%s: it speaks PJRT API %d.%d, major version %d is needed", path, api->version.major, api->version.minor,
         SUPPORTED_MAJOR);
  } else if (api->struct_size < sizeof(Api)) {
    fail("%s: its PJRT function table is %zu bytes long, %zu are needed", path, api->struct_size, sizeof(Api));
  } else if (!api->client_create || !api->num_outputs || !api->output_memory_kinds) {
    fail("%s: its PJRT function table has holes where functions are needed", path);
  } else {
    return 1;
  }
  return 0;
}

static void load(void) {
  const char *path = getenv(PLUGIN_VARIABLE);
  if (!path || !*path) {
    fail("%s does not name a PJRT CPU plugin", PLUGIN_VARIABLE);
    return;
  }
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fail("cannot load the PJRT CPU plugin: %s", dlerror());
    return;
  }
  const Api *(*get_api)(void) = (const Api *(*)(void))dlsym(library, "GetPjrtApi");
  if (!get_api) {
    fail("%s: not a PJRT plugin, it has no function GetPjrtApi", path);
    return;
  }
  const Api *api = get_api();
  if (!fits(path, api)) return;
  Api *copy = malloc(api->struct_size);
  if (!copy) {
    fail("out of memory");
    return;
  }
  memcpy(copy, api, api->struct_size);
  copy->client_create = client_create;
  copy->output_memory_kinds = output_memory_kinds;
  add_topology(copy);
  register_kernels(api);
  plugin = api;
  patched = copy;
}

/* Returns the function table, or NULL when the plugin cannot be used. */
__attribute__((visibility("default"))) const Api *GetPjrtApi(void) {
  pthread_once(&once, load);
  return patched;
}

/* Returns why GetPjrtApi returns NULL: one sentence, empty when it does not. Valid for ever. */
__attribute__((visibility("default"))) const char *tpugate_pjrt_error(void) {
  pthread_once(&once, load);
  return failure;
}

/* Returns the plugin's PJRT minor version, or -1 when it cannot be used. */
__attribute__((visibility("default"))) int tpugate_pjrt_minor(void) {
  pthread_once(&once, load);
  return plugin ? plugin->version.minor : -1;
}

/* Returns 1 if the custom call `tpugate_paged_attention` can be made, see attention.c; else 0. */
__attribute__((visibility("default"))) int tpugate_pjrt_has_attention(void) {
  pthread_once(&once, load);
  return has_attention;
}

/* Returns 1 if the custom call `tpugate_linear` can be made, see linear.c; else 0. */
__attribute__((visibility("default"))) int tpugate_pjrt_has_linear(void) {
  pthread_once(&once, load);
  return has_linear;
}
