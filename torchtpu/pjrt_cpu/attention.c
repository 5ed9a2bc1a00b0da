/* Ragged paged attention on the CPU: each token reads the keys and values that it may see, in place, and no others.
 *
 *   query [N, heads, dim]   key [N, kv_heads, dim]   value [N, kv_heads, value_dim]      bfloat16 or float32, all alike
 *   keys [kv_heads · slots, dim]   values [kv_heads · slots, value_dim]                  updated in place, returned
 *   slots [N]           where each token's key and value go; one out of range goes nowhere
 *   positions [N]       a token sees the keys 0 … its own position
 *   tables [B, blocks]  blocks of a sequence, in its order     token_tables [N]  the table of each token
 *   sinks [heads]       float32 logits that take their share and give nothing; -inf is none
 *   options [4]         float32: block length, scale, soft cap (0 is off), window in tokens (0 is off)
 *
 * The function behind the torch operation of the same name, see torchtpu/ops/native_attention.py. Scores, softmax and
 * sums are float32. All writes come before all reads, so tokens of one call see each other. The work, one item for a
 * token and a key head, is shared with XLA's own threads. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "xla_ffi.h"

#define LANES 16
#define GROUP 4 /* query heads that share one pass over keys and values */
#define CHUNK 4 /* vectors of a value that are summed in registers */
#define INLINE static inline __attribute__((always_inline))

typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));

typedef struct {
  const char *query, *key, *value;
  char *keys, *values, *out;
  const int32_t *slots, *positions, *tables, *token_tables;
  const float *sinks;
  int64_t num_tokens, heads, kv_heads, dim, value_dim, num_slots, table_len, num_tables, block_len, window;
  float scale, softcap;
  int type;
  const FfiApi *api;
  FfiFuture *future; /* NULL when one thread does it all */
  int64_t num_items;
  float *scratch; /* scratch_len for each thread */
  int64_t scratch_len;
  atomic_llong next, unfinished;
  atomic_int users, thread;
} Job;

/* ---- Vectors ---- */

INLINE int64_t width(int type) { return type == FFI_BFLOAT16 ? 2 : 4; }

INLINE Lanes load(const char *at, int type) {
  if (type == FFI_FLOAT32) return *(const Lanes *)at;
  return (Lanes)(__builtin_convertvector(*(const Shorts *)at, Ints) << 16);
}

INLINE float load_one(const char *at, int type) {
  float value;
  if (type == FFI_FLOAT32) {
    memcpy(&value, at, 4);
  } else {
    uint16_t half;
    memcpy(&half, at, 2);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
  }
  return value;
}

INLINE void store_one(char *at, float value, int type) {
  if (type == FFI_FLOAT32) {
    memcpy(at, &value, 4);
  } else { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    memcpy(at, &half, 2);
  }
}

INLINE float sum_lanes(Lanes lanes) {
  Half halves[2];
  memcpy(halves, &lanes, sizeof lanes);
  Half half = halves[0] + halves[1];
  Quarter quarters[2];
  memcpy(quarters, &half, sizeof half);
  Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

/* e^x for x <= 0, with the polynomial of Cephes' expf: within 2 units in the last place; 1e-38 below -87. */
INLINE Lanes exp_lanes(Lanes x) {
  const Lanes least = (Lanes){} - 87.0f;
  const Ints is_less = x < least;
  x = (Lanes)(((Ints)least & is_less) | ((Ints)x & ~is_less));
  const Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints); /* truncates: to the nearest */
  const Lanes n = __builtin_convertvector(power, Lanes);
  const Lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Lanes p = (Lanes){} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Lanes)((Ints)p + (power << 23));
}

/* ---- One token, up to GROUP query heads of one key head ---- */

typedef struct {
  int64_t first, last; /* positions it sees */
  int64_t base;        /* the first one's block begins here; scores are indexed from it */
  int64_t stride;      /* of the scores of one head, a multiple of LANES */
  const int32_t *table;
} Span;

INLINE const char *block_at(const Job *job, const Span *span, int64_t position, int64_t kv_head, const char *cache,
                            int64_t row) {
  int64_t block = span->table[position / job->block_len];
  if (block < 0 || (block + 1) * job->block_len > job->num_slots) block = 0;
  return cache + (kv_head * job->num_slots + block * job->block_len) * row;
}

/* Into the second level: the first one has too few places for lines on their way. */
INLINE void prefetch(const char *block, int64_t size) {
  for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(block + at, 0, 2);
}

/* Scores of the keys from … to of a block; q are n scaled query heads of dim floats. */
INLINE void score_block(const Job *job, const float *q, int n, const char *block, int64_t from, int64_t to,
                        float *scores, int64_t stride, int type) {
  const int64_t dim = job->dim, whole = dim / LANES * LANES;
  for (int64_t j = from; j < to; j++) {
    const char *key = block + j * dim * width(type);
    Lanes sums[GROUP];
    for (int g = 0; g < n; g++) sums[g] = (Lanes){};
    for (int64_t c = 0; c < whole; c += LANES) {
      const Lanes part = load(key + c * width(type), type);
      for (int g = 0; g < n; g++) sums[g] += part * *(const Lanes *)(q + g * dim + c);
    }
    for (int g = 0; g < n; g++) {
      float score = sum_lanes(sums[g]);
      for (int64_t c = whole; c < dim; c++) score += load_one(key + c * width(type), type) * q[g * dim + c];
      scores[g * stride + j] = score;
    }
  }
}

/* Scores to weights e^(score - largest), 0 outside first … last; gives 1 / their sum, the sink's share in it. */
INLINE float soften(const Job *job, const Span *span, float *scores, float sink) {
  const int64_t before = span->first - span->base, count = span->last + 1 - span->base;
  float largest = sink;
  if (job->softcap > 0)
    for (int64_t j = before; j < count; j++) scores[j] = job->softcap * tanhf(scores[j] / job->softcap);
  for (int64_t j = before; j < count; j++) largest = scores[j] > largest ? scores[j] : largest;
  for (int64_t j = 0; j < before; j++) scores[j] = largest;
  for (int64_t j = count; j < span->stride; j++) scores[j] = largest;
  for (int64_t j = 0; j < span->stride; j += LANES)
    *(Lanes *)(scores + j) = exp_lanes(*(const Lanes *)(scores + j) - largest);
  for (int64_t j = 0; j < before; j++) scores[j] = 0;
  for (int64_t j = count; j < span->stride; j++) scores[j] = 0;
  Lanes sums = {};
  for (int64_t j = 0; j < span->stride; j += LANES) sums += *(const Lanes *)(scores + j);
  return 1 / (sum_lanes(sums) + (sink == -INFINITY ? 0 : expf(sink - largest)));
}

/* Columns c … of the weighted sum of values, `parts` vectors of them, for n heads. */
INLINE void blend(const Job *job, const Span *span, const float *weights, const float *norms, int n, int64_t kv_head,
                  int64_t c, int parts, char *out, int type) {
  const int64_t row = job->value_dim * width(type), block_len = job->block_len;
  Lanes sums[GROUP][CHUNK];
  for (int g = 0; g < n; g++)
    for (int i = 0; i < parts; i++) sums[g][i] = (Lanes){};
  for (int64_t at = span->base; at <= span->last; at += block_len) {
    const char *block = block_at(job, span, at, kv_head, job->values, row);
    const int64_t from = at < span->first ? span->first - at : 0;
    const int64_t to = span->last + 1 - at < block_len ? span->last + 1 - at : block_len;
    for (int64_t j = from; j < to; j++) {
      Lanes value[CHUNK];
      for (int i = 0; i < parts; i++) value[i] = load(block + j * row + (c + i * LANES) * width(type), type);
      for (int g = 0; g < n; g++)
        for (int i = 0; i < parts; i++) sums[g][i] += weights[g * span->stride + at - span->base + j] * value[i];
    }
  }
  for (int g = 0; g < n; g++)
    for (int i = 0; i < parts; i++)
      for (int lane = 0; lane < LANES; lane++)
        store_one(out + (g * job->value_dim + c + i * LANES + lane) * width(type), sums[g][i][lane] * norms[g], type);
}

/* The same for one column, where value_dim is no multiple of LANES. */
static void blend_one(const Job *job, const Span *span, const float *weights, const float *norms, int n,
                      int64_t kv_head, int64_t c, char *out, int type) {
  const int64_t row = job->value_dim * width(type);
  for (int g = 0; g < n; g++) {
    float sum = 0;
    for (int64_t p = span->first; p <= span->last; p++)
      sum += weights[g * span->stride + p - span->base] *
             load_one(block_at(job, span, p, kv_head, job->values, row) + p % job->block_len * row + c * width(type), type);
    store_one(out + (g * job->value_dim + c) * width(type), sum * norms[g], type);
  }
}

INLINE void attend(const Job *job, int64_t token, int64_t kv_head, int64_t head, int n, float *scratch, int type) {
  const int64_t dim = job->dim, block_len = job->block_len, row = dim * width(type);
  const int64_t value_row = job->value_dim * width(type);
  Span span = {.last = job->positions[token], .table = job->tables + job->token_tables[token] * job->table_len};
  if (job->window > 0 && span.last >= job->window) span.first = span.last + 1 - job->window;
  span.base = span.first / block_len * block_len;
  span.stride = (span.last + LANES - span.base) / LANES * LANES;
  float *q = scratch, *scores = scratch + GROUP * dim, norms[GROUP];
  const char *query = job->query + (token * job->heads + head) * row;
  for (int64_t i = 0; i < n * dim; i++) q[i] = load_one(query + i * width(type), type) * job->scale;
  const char *block = block_at(job, &span, span.base, kv_head, job->keys, row);
  for (int64_t at = span.base; at <= span.last; at += block_len) {
    const char *here = block;
    if (at + block_len <= span.last) {
      block = block_at(job, &span, at + block_len, kv_head, job->keys, row);
      prefetch(block, block_len * row);
    }
    prefetch(block_at(job, &span, at, kv_head, job->values, value_row), block_len * value_row);
    const int64_t from = at < span.first ? span.first - at : 0;
    const int64_t to = span.last + 1 - at < block_len ? span.last + 1 - at : block_len;
    score_block(job, q, n, here, from, to, scores + at - span.base, span.stride, type);
  }
  for (int g = 0; g < n; g++) norms[g] = soften(job, &span, scores + g * span.stride, job->sinks[head + g]);
  char *out = job->out + (token * job->heads + head) * job->value_dim * width(type);
  int64_t c = 0;
  for (; c + CHUNK * LANES <= job->value_dim; c += CHUNK * LANES)
    blend(job, &span, scores, norms, n, kv_head, c, CHUNK, out, type);
  for (; c + LANES <= job->value_dim; c += LANES) blend(job, &span, scores, norms, n, kv_head, c, 1, out, type);
  for (; c < job->value_dim; c++) blend_one(job, &span, scores, norms, n, kv_head, c, out, type);
}

INLINE void attend_item(const Job *job, int64_t item, float *scratch, int type) {
  const int64_t token = item / job->kv_heads, kv_head = item % job->kv_heads;
  int64_t left = job->heads / job->kv_heads, head = kv_head * left;
  for (; left >= GROUP; left -= GROUP, head += GROUP) attend(job, token, kv_head, head, GROUP, scratch, type);
  if (left == 3) attend(job, token, kv_head, head, 3, scratch, type);
  if (left == 2) attend(job, token, kv_head, head, 2, scratch, type);
  if (left == 1) attend(job, token, kv_head, head, 1, scratch, type);
}

/* ---- The call ---- */

static void release(Job *job) {
  if (atomic_fetch_sub(&job->users, 1) > 1) return;
  free(job->scratch);
  free(job);
}

/* Takes items until there are none. The call is over with its last item, not with its last thread: a thread that XLA
 * starts late finds nothing to do. */
static void work(void *data) {
  Job *job = data;
  float *scratch = job->scratch + atomic_fetch_add(&job->thread, 1) * job->scratch_len;
  int64_t item;
  while ((item = atomic_fetch_add(&job->next, 1)) < job->num_items) {
    if (job->type == FFI_BFLOAT16)
      attend_item(job, item, scratch, FFI_BFLOAT16);
    else
      attend_item(job, item, scratch, FFI_FLOAT32);
    if (atomic_fetch_sub(&job->unfinished, 1) == 1 && job->future) {
      FfiFutureArgs args = {sizeof args, NULL, job->future};
      job->api->future_set_available(&args);
    }
  }
  release(job);
}

static FfiError *fail(const FfiCallFrame *frame, int code, const char *message) {
  FfiErrorCreateArgs args = {sizeof args, NULL, message, code};
  return frame->api->error_create(&args);
}

enum { QUERY, KEY, VALUE, KEYS, VALUES, SLOTS, POSITIONS, TABLES, TOKEN_TABLES, SINKS, OPTIONS, NUM_ARGUMENTS };

static int has_right_shapes(const FfiCallFrame *frame) {
  static const int ranks[NUM_ARGUMENTS] = {3, 3, 3, 2, 2, 1, 1, 2, 1, 1, 1};
  FfiBuffer **a = frame->arguments.buffers;
  if (frame->arguments.size != NUM_ARGUMENTS || frame->results.size != 3) return 0;
  const int type = a[QUERY]->type;
  if (type != FFI_BFLOAT16 && type != FFI_FLOAT32) return 0;
  for (int i = 0; i < NUM_ARGUMENTS; i++) {
    const int expected = i <= VALUES ? type : i >= SINKS ? FFI_FLOAT32 : FFI_INT32;
    if (a[i]->rank != ranks[i] || a[i]->type != expected) return 0;
  }
  const int64_t tokens = a[QUERY]->dims[0], heads = a[QUERY]->dims[1], kv_heads = a[KEY]->dims[1];
  return kv_heads > 0 && heads % kv_heads == 0 && a[KEY]->dims[0] == tokens && a[VALUE]->dims[0] == tokens &&
         a[VALUE]->dims[1] == kv_heads && a[KEY]->dims[2] == a[QUERY]->dims[2] && a[KEYS]->dims[1] == a[KEY]->dims[2] &&
         a[VALUES]->dims[1] == a[VALUE]->dims[2] && a[KEYS]->dims[0] == a[VALUES]->dims[0] &&
         a[KEYS]->dims[0] % kv_heads == 0 && a[SLOTS]->dims[0] == tokens && a[POSITIONS]->dims[0] == tokens &&
         a[TOKEN_TABLES]->dims[0] == tokens && a[SINKS]->dims[0] == heads && a[OPTIONS]->dims[0] == 4;
}

static int has_right_indices(const Job *job) {
  if (job->block_len < 1 || job->num_slots < job->block_len) return 0;
  for (int64_t t = 0; t < job->num_tokens; t++) {
    if (job->token_tables[t] < 0 || job->token_tables[t] >= job->num_tables) return 0;
    if (job->positions[t] < 0 || job->positions[t] / job->block_len >= job->table_len) return 0;
  }
  return 1;
}

static void write_cache(const Job *job) {
  const int64_t row = job->dim * width(job->type), value_row = job->value_dim * width(job->type);
  for (int64_t t = 0; t < job->num_tokens; t++) {
    if (job->slots[t] < 0 || job->slots[t] >= job->num_slots) continue;
    for (int64_t head = 0; head < job->kv_heads; head++) {
      const int64_t to = head * job->num_slots + job->slots[t], from = t * job->kv_heads + head;
      memcpy(job->keys + to * row, job->key + from * row, row);
      memcpy(job->values + to * value_row, job->value + from * value_row, value_row);
    }
  }
}

/* How many threads of XLA's to ask for beside this one. */
static int num_helpers(const FfiCallFrame *frame, int64_t num_items) {
  int64_t num_threads = 1;
  FfiNumThreadsArgs args = {sizeof args, NULL, frame->context, &num_threads};
  if (frame->api->struct_size < sizeof(FfiApi) || frame->api->thread_pool_num_threads(&args)) return 0;
  if (num_threads > num_items) num_threads = num_items;
  return num_threads > 1 ? (int)num_threads - 1 : 0;
}

static FfiError *start(FfiCallFrame *frame, Job *job) {
  int helpers = num_helpers(frame, job->num_items);
  if (helpers) {
    FfiFutureArgs args = {sizeof args, NULL, NULL};
    if (frame->api->future_create(&args)) helpers = 0;
    frame->future = job->future = args.future;
  }
  job->scratch_len = GROUP * (job->dim + (job->table_len + 1) * job->block_len + LANES);
  job->scratch = malloc((helpers + 1) * job->scratch_len * sizeof *job->scratch);
  if (!job->scratch) {
    free(job);
    return fail(frame, FFI_ERROR_RESOURCE_EXHAUSTED, "paged attention: out of memory");
  }
  atomic_store(&job->users, helpers + 1);
  for (int i = 0; i < helpers; i++) {
    FfiScheduleArgs args = {sizeof args, NULL, frame->context, work, job};
    if (frame->api->thread_pool_schedule(&args)) release(job);
  }
  work(job);
  return NULL;
}

FfiError *tpugate_paged_attention(FfiCallFrame *frame) {
  if (frame->extensions && frame->extensions->type == FFI_EXTENSION_METADATA) {
    FfiMetadataExtension *question = (FfiMetadataExtension *)frame->extensions;
    question->metadata->version.major = 0;
    question->metadata->version.minor = 3; /* of the header that the declarations were taken from */
    question->metadata->traits = 0;
    return NULL;
  }
  if (frame->stage != FFI_STAGE_EXECUTE) return NULL;
  if (!has_right_shapes(frame))
    return fail(frame, FFI_ERROR_INVALID_ARGUMENT, "paged attention: shapes or types do not fit");
  FfiBuffer **a = frame->arguments.buffers, **r = frame->results.buffers;
  const float *options = a[OPTIONS]->data;
  Job *job = calloc(1, sizeof *job);
  if (!job) return fail(frame, FFI_ERROR_RESOURCE_EXHAUSTED, "paged attention: out of memory");
  job->query = a[QUERY]->data, job->key = a[KEY]->data, job->value = a[VALUE]->data;
  job->out = r[0]->data, job->keys = r[1]->data, job->values = r[2]->data;
  job->slots = a[SLOTS]->data, job->positions = a[POSITIONS]->data;
  job->tables = a[TABLES]->data, job->token_tables = a[TOKEN_TABLES]->data, job->sinks = a[SINKS]->data;
  job->num_tokens = a[QUERY]->dims[0], job->heads = a[QUERY]->dims[1], job->kv_heads = a[KEY]->dims[1];
  job->dim = a[QUERY]->dims[2], job->value_dim = a[VALUE]->dims[2];
  job->num_slots = a[KEYS]->dims[0] / job->kv_heads;
  job->num_tables = a[TABLES]->dims[0], job->table_len = a[TABLES]->dims[1];
  job->block_len = options[0], job->scale = options[1], job->softcap = options[2], job->window = options[3];
  job->type = a[QUERY]->type, job->api = frame->api;
  job->num_items = job->num_tokens * job->kv_heads;
  atomic_store(&job->unfinished, job->num_items);
  if (!job->num_items || !has_right_indices(job)) {
    const int is_empty = !job->num_items;
    free(job);
    return is_empty ? NULL : fail(frame, FFI_ERROR_INVALID_ARGUMENT, "paged attention: a position has no block");
  }
  /* XLA gives the caches' own memory when they are donated; otherwise copies are updated. */
  if (job->keys != a[KEYS]->data) memcpy(job->keys, a[KEYS]->data, a[KEYS]->dims[0] * job->dim * width(job->type));
  if (job->values != a[VALUES]->data)
    memcpy(job->values, a[VALUES]->data, a[VALUES]->dims[0] * job->value_dim * width(job->type));
  write_cache(job);
  return start(frame, job);
}
