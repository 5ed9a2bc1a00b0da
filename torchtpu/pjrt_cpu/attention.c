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
 * sums are float32. All writes come before all reads, so tokens of one call see each other. Neighbouring tokens of one
 * sequence, a run, share one pass over keys and values. The work, one item for a run and a key head, is shared with XLA's
 * own threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#include "work.h"
#include "xla_ffi.h"

#define GROUP 4 /* query heads that share one pass over keys and values */
#define CHUNK 4 /* vectors of a value that are summed in registers */
#define RUN 16  /* tokens of a sequence that share one pass, at most */
#define TILE 32 /* keys that a pass takes at a time, two vectors */
#define STRIP 8 /* rows of scores that are summed in registers */

typedef struct {
  const char *query, *key, *value;
  char *keys, *values, *out;
  const int32_t *slots, *positions, *tables, *token_tables;
  const float *sinks;
  int64_t num_tokens, heads, kv_heads, dim, value_dim, num_slots, table_len, num_tables, block_len, window;
  float scale, softcap;
  int type;
  int32_t *runs; /* the first token of each run, and the end */
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

/* ---- One token: up to GROUP query heads of one key head ---- */

typedef struct {
  int64_t first, last; /* positions it sees */
  int64_t base;        /* the first one's block begins here; scores are indexed from it */
  int64_t stride;      /* of the scores of one head, a multiple of LANES */
  const int32_t *table;
} Span;

INLINE Span span_of(const Job *job, int64_t token) {
  Span span = {.last = job->positions[token], .table = job->tables + job->token_tables[token] * job->table_len};
  if (job->window > 0 && span.last >= job->window) span.first = span.last + 1 - job->window;
  span.base = span.first / job->block_len * job->block_len;
  return span;
}

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

INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE float largest_of(const float *scores, int64_t count) {
  Lanes most = *(const Lanes *)scores;
  for (int64_t j = LANES; j < count; j += LANES) {
    const Lanes other = *(const Lanes *)(scores + j);
    const Ints is_more = other > most;
    most = (Lanes)(((Ints)other & is_more) | ((Ints)most & ~is_more));
  }
  float largest = most[0];
  for (int i = 1; i < LANES; i++) largest = larger(largest, most[i]);
  return largest;
}

/* Scores to weights e^(score - largest), 0 outside first … last; gives 1 / their sum, the sink's share in it. */
INLINE float soften(const Job *job, const Span *span, float *scores, float sink) {
  const int64_t before = span->first - span->base, count = span->last + 1 - span->base;
  if (job->softcap > 0)
    for (int64_t j = before; j < count; j++) scores[j] = job->softcap * tanhf(scores[j] / job->softcap);
  /* Whole vectors: what is outside is no larger than what is inside, and gets no weight below. */
  for (int64_t j = 0; j < before; j++) scores[j] = scores[before];
  for (int64_t j = count; j < span->stride; j++) scores[j] = scores[before];
  const float largest = larger(sink, largest_of(scores, span->stride));
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
  Span span = span_of(job, token);
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

/* ---- A run of tokens ----
 *
 * The query heads of all its tokens are the rows of a matrix. Per tile of keys: scores = rows · keysᵀ with a key in each
 * lane, so nothing is summed across lanes; then weights, row by row, each over what its own token sees; then the sum of
 * values per tile. A key that one row does not see is seen by another: nothing foreign is ever read. */

typedef struct {
  Span span; /* what any of the tokens sees; its stride is a multiple of TILE */
  int64_t first_token, num_tokens, kv_head, head, num_heads;
  int64_t num_rows;   /* num_tokens · num_heads, rounded up to STRIP */
  int64_t value_wide; /* value_dim, rounded up to LANES */
  float *q, *scores, *tile, *sums, *norms;
} Run;

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Floats that attend_run needs for n query heads of a key head. */
static int64_t run_scratch_len(const Job *job, int n) {
  const int64_t rows = round_up(RUN * n, STRIP), value_wide = round_up(job->value_dim, LANES);
  const int64_t wide = job->dim > value_wide ? job->dim : value_wide;
  return rows * (job->dim + (job->table_len + 1) * job->block_len + TILE + value_wide + 1) + TILE * wide;
}

/* The keys of a tile, dimension by dimension: tile [dim, TILE]. */
INLINE void take_keys(const Job *job, const char *const *keys, float *tile, int type) {
  const int64_t dim = job->dim, whole = dim / LANES * LANES;
  for (int j = 0; j < TILE; j += LANES)
    for (int64_t c = 0; c < whole; c += LANES) {
      Lanes rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = load(keys[j + i] + c * width(type), type);
      TRANSPOSE(rows)
      for (int i = 0; i < LANES; i++) *(Lanes *)(tile + (c + i) * TILE + j) = rows[i];
    }
  for (int64_t c = whole; c < dim; c++)
    for (int j = 0; j < TILE; j++) tile[c * TILE + j] = load_one(keys[j] + c * width(type), type);
}

/* The values of a tile: tile [TILE, value_wide]. */
INLINE void take_values(const Job *job, const Run *run, const char *const *values, float *tile, int type) {
  for (int j = 0; j < TILE; j++) {
    float *to = tile + j * run->value_wide;
    int64_t c = 0;
    for (; c + LANES <= job->value_dim; c += LANES) *(Lanes *)(to + c) = load(values[j] + c * width(type), type);
    for (; c < job->value_dim; c++) to[c] = load_one(values[j] + c * width(type), type);
    for (; c < run->value_wide; c++) to[c] = 0;
  }
}

/* Where the keys or values from position `at` on lie; past the end, the last one again, whose weight will be 0. */
INLINE void locate(const Job *job, const Run *run, int64_t at, const char *cache, int64_t row, const char **places) {
  for (int j = 0; j < TILE; j++) {
    const int64_t position = at + j < run->span.last ? at + j : run->span.last;
    places[j] = block_at(job, &run->span, position, run->kv_head, cache, row) + position % job->block_len * row;
  }
}

/* scores [STRIP, TILE] = q [STRIP, dim] · tile [dim, TILE] */
INLINE void score_tile(const float *q, const float *tile, int64_t dim, float *scores, int64_t stride) {
  Lanes sums[STRIP][2];
  for (int g = 0; g < STRIP; g++) sums[g][0] = sums[g][1] = (Lanes){};
  for (int64_t c = 0; c < dim; c++) {
    const Lanes low = *(const Lanes *)(tile + c * TILE), high = *(const Lanes *)(tile + c * TILE + LANES);
    for (int g = 0; g < STRIP; g++) sums[g][0] += q[g * dim + c] * low, sums[g][1] += q[g * dim + c] * high;
  }
  for (int g = 0; g < STRIP; g++) {
    *(Lanes *)(scores + g * stride) = sums[g][0];
    *(Lanes *)(scores + g * stride + LANES) = sums[g][1];
  }
}

/* sums [GROUP, parts · LANES] += weights [GROUP, TILE] · tile [TILE, parts · LANES] */
INLINE void blend_tile(const float *weights, int64_t stride, const float *tile, int64_t wide, float *out, int parts) {
  Lanes sums[GROUP][CHUNK];
  for (int g = 0; g < GROUP; g++)
    for (int i = 0; i < parts; i++) sums[g][i] = *(const Lanes *)(out + g * wide + i * LANES);
  for (int j = 0; j < TILE; j++) {
    Lanes value[CHUNK];
    for (int i = 0; i < parts; i++) value[i] = *(const Lanes *)(tile + j * wide + i * LANES);
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < parts; i++) sums[g][i] += weights[g * stride + j] * value[i];
  }
  for (int g = 0; g < GROUP; g++)
    for (int i = 0; i < parts; i++) *(Lanes *)(out + g * wide + i * LANES) = sums[g][i];
}

/* Row r is head r % num_heads of token r / num_heads; rows without a token are 0. */
INLINE void take_queries(const Job *job, const Run *run, int type) {
  const int64_t dim = job->dim;
  for (int64_t r = 0; r < run->num_rows; r++) {
    const int64_t token = run->first_token + r / run->num_heads, head = run->head + r % run->num_heads;
    const int is_there = r < run->num_tokens * run->num_heads;
    const char *query = job->query + (token * job->heads + head) * dim * width(type);
    for (int64_t c = 0; c < dim; c++)
      run->q[r * dim + c] = is_there ? load_one(query + c * width(type), type) * job->scale : 0;
  }
}

INLINE void soften_rows(const Job *job, const Run *run) {
  const int64_t stride = run->span.stride;
  for (int64_t r = 0; r < run->num_rows; r++) {
    if (r >= run->num_tokens * run->num_heads) {
      memset(run->scores + r * stride, 0, stride * sizeof(float));
      continue;
    }
    Span span = span_of(job, run->first_token + r / run->num_heads);
    span.base = run->span.base, span.stride = stride;
    run->norms[r] = soften(job, &span, run->scores + r * stride, job->sinks[run->head + r % run->num_heads]);
  }
}

INLINE void give_answers(const Job *job, const Run *run, int type) {
  for (int64_t r = 0; r < run->num_tokens * run->num_heads; r++) {
    const int64_t token = run->first_token + r / run->num_heads, head = run->head + r % run->num_heads;
    char *out = job->out + (token * job->heads + head) * job->value_dim * width(type);
    for (int64_t c = 0; c < job->value_dim; c++)
      store_one(out + c * width(type), run->sums[r * run->value_wide + c] * run->norms[r], type);
  }
}

/* n query heads of one key head, of the tokens first … first + count - 1, which have one table. */
INLINE void attend_run(const Job *job, int64_t first, int64_t count, int64_t kv_head, int64_t head, int n,
                       float *scratch, int type) {
  Run run = {.span = span_of(job, first), .first_token = first, .num_tokens = count, .kv_head = kv_head, .head = head,
             .num_heads = n, .num_rows = round_up(count * n, STRIP), .value_wide = round_up(job->value_dim, LANES)};
  for (int64_t token = first + 1; token < first + count; token++) {
    const Span other = span_of(job, token);
    if (other.base < run.span.base) run.span.base = other.base;
    if (other.last > run.span.last) run.span.last = other.last;
  }
  const int64_t dim = job->dim, stride = run.span.stride = round_up(run.span.last + 1 - run.span.base, TILE);
  run.q = scratch, run.scores = run.q + run.num_rows * dim, run.sums = run.scores + run.num_rows * stride;
  run.norms = run.sums + run.num_rows * run.value_wide, run.tile = run.norms + run.num_rows;
  const char *places[TILE];
  take_queries(job, &run, type);
  for (int64_t j = 0; j < stride; j += TILE) {
    locate(job, &run, run.span.base + j, job->keys, dim * width(type), places);
    take_keys(job, places, run.tile, type);
    for (int64_t r = 0; r < run.num_rows; r += STRIP)
      score_tile(run.q + r * dim, run.tile, dim, run.scores + r * stride + j, stride);
  }
  soften_rows(job, &run);
  memset(run.sums, 0, run.num_rows * run.value_wide * sizeof(float));
  for (int64_t j = 0; j < stride; j += TILE) {
    locate(job, &run, run.span.base + j, job->values, job->value_dim * width(type), places);
    take_values(job, &run, places, run.tile, type);
    for (int64_t r = 0; r < run.num_rows; r += GROUP) {
      const float *weights = run.scores + r * stride + j;
      float *sums = run.sums + r * run.value_wide;
      int64_t c = 0;
      for (; c + CHUNK * LANES <= run.value_wide; c += CHUNK * LANES)
        blend_tile(weights, stride, run.tile + c, run.value_wide, sums + c, CHUNK);
      for (; c < run.value_wide; c += LANES) blend_tile(weights, stride, run.tile + c, run.value_wide, sums + c, 1);
    }
  }
  give_answers(job, &run, type);
}

/* ---- The work ---- */

INLINE void attend_heads(const Job *job, int64_t first, int64_t count, int64_t kv_head, int64_t head, int n,
                         float *scratch, int type) {
  if (count == 1)
    attend(job, first, kv_head, head, n, scratch, type);
  else
    attend_run(job, first, count, kv_head, head, n, scratch, type);
}

INLINE void attend_item(const Job *job, int64_t item, float *scratch, int type) {
  const int64_t run = item / job->kv_heads, kv_head = item % job->kv_heads;
  const int64_t first = job->runs[run], count = job->runs[run + 1] - first;
  int64_t left = job->heads / job->kv_heads, head = kv_head * left;
  for (; left >= GROUP; left -= GROUP, head += GROUP)
    attend_heads(job, first, count, kv_head, head, GROUP, scratch, type);
  if (left == 3) attend_heads(job, first, count, kv_head, head, 3, scratch, type);
  if (left == 2) attend_heads(job, first, count, kv_head, head, 2, scratch, type);
  if (left == 1) attend_heads(job, first, count, kv_head, head, 1, scratch, type);
}

/* ---- The call ---- */

static void free_job(void *data) {
  Job *job = data;
  free(job->runs);
  free(job);
}

static void attend_items(Work *work, void *data, float *scratch) {
  const Job *job = data;
  for (int64_t item; (item = next_item(work)) >= 0; finish_item(work)) {
    if (job->type == FFI_BFLOAT16)
      attend_item(job, item, scratch, FFI_BFLOAT16);
    else
      attend_item(job, item, scratch, FFI_FLOAT32);
  }
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

/* Neighbouring tokens of one table, up to RUN of them. Gives how many runs there are; `runs` has room for one a token. */
static int64_t find_runs(const Job *job, int32_t *runs) {
  int64_t count = 0;
  for (int64_t t = 0; t < job->num_tokens; t++)
    if (t == 0 || job->token_tables[t] != job->token_tables[t - 1] || t - runs[count - 1] == RUN) runs[count++] = t;
  runs[count] = job->num_tokens;
  return count;
}

FfiError *tpugate_paged_attention(FfiCallFrame *frame) {
  if (is_question(frame) || frame->stage != FFI_STAGE_EXECUTE) return NULL;
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
  job->type = a[QUERY]->type;
  job->runs = malloc((job->num_tokens + 1) * sizeof *job->runs);
  if (!job->runs || !job->num_tokens || !has_right_indices(job)) {
    const int is_empty = !job->num_tokens, is_out = !job->runs;
    free_job(job);
    if (is_out) return fail(frame, FFI_ERROR_RESOURCE_EXHAUSTED, "paged attention: out of memory");
    return is_empty ? NULL : fail(frame, FFI_ERROR_INVALID_ARGUMENT, "paged attention: a position has no block");
  }
  /* XLA gives the caches' own memory when they are donated; otherwise copies are updated. */
  if (job->keys != a[KEYS]->data) memcpy(job->keys, a[KEYS]->data, a[KEYS]->dims[0] * job->dim * width(job->type));
  if (job->values != a[VALUES]->data)
    memcpy(job->values, a[VALUES]->data, a[VALUES]->dims[0] * job->value_dim * width(job->type));
  write_cache(job);
  const int64_t group = job->heads / job->kv_heads;
  const WorkPlan plan = {attend_items, free_job, job, .num_items = find_runs(job, job->runs) * job->kv_heads,
                         .scratch_len = run_scratch_len(job, group < GROUP ? group : GROUP)};
  return share(frame, &plan);
}
