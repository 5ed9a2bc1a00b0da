/* The product of activations with a weight as PyTorch keeps it, on the matrix units (AMX) that some processors have.
 *
 *   x [M, K]   w [N, K]   gives x · wᵀ [M, N]        bfloat16, sums in float32; K a multiple of 32, N of 16
 *
 * The function behind the torch operation of the same name, see torchtpu/ops/native_linear.py. A weight is read where it
 * lies, once: its rows are the unpacked operand of the matrix unit, so it is xᵀ, the smaller of the two, that is packed,
 * and what comes out, w · xᵀ, is turned while it is rounded. */
#include "xla_ffi.h"

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"
#include "work.h"

#define SIDE 16         /* rows and columns of a tile of sums */
#define DEPTH 32        /* what one instruction sums over */
#define TILE 512        /* numbers in a tile of an operand */
#define FEW_TOKENS 64   /* up to which a weight is read but once or twice: small items share the work evenly */
#define FEW_ROWS 32     /* of a weight, in an item of few tokens */
#define MANY_ROWS 96    /* with many tokens: so often is a packed pair of tiles used while it lies in the first cache */
#define ASK_FOR_PERMISSION 0x1023
#define TILE_DATA 18

typedef struct {
  const uint16_t *w;
  uint16_t *out, *packed; /* packed [M / SIDE, K / DEPTH]: tiles [DEPTH / 2, SIDE, 2] of xᵀ */
  int64_t m, n, k, rows;  /* rows of an item */
} Job;

static void free_job(void *data) {
  Job *job = data;
  free(job->packed);
  free(job);
}

/* Pairs of neighbouring numbers move as one: sixteen by sixteen are transposed. Tokens that are not there are 0. */
static void pack(const Job *job, const uint16_t *x) {
  uint16_t *to = job->packed;
  for (int64_t m = 0; m < job->m; m += SIDE)
    for (int64_t k = 0; k < job->k; k += DEPTH, to += TILE) {
      Lanes rows[LANES];
      for (int i = 0; i < SIDE; i++)
        rows[i] = m + i < job->m ? *(const Lanes *)(x + (m + i) * job->k + k) : (Lanes){};
      TRANSPOSE(rows)
      memcpy(to, rows, sizeof rows);
    }
}

static void configure(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = SIDE;
  _tile_loadconfig(&tiles);
}

/* sums [n, m], SIDE of each, to out [m, n] in bfloat16; `left` is how many of m there are. */
INLINE void give(const float *sums, uint16_t *out, int64_t stride, int64_t left) {
  const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                                21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i pairs[8], fours[8], eights[8]; /* of neighbours in n, for each m */
  for (int i = 0; i < 8; i++) {
    const __m512 low = _mm512_load_ps(sums + 2 * i * SIDE), high = _mm512_load_ps(sums + (2 * i + 1) * SIDE);
    pairs[i] = _mm512_permutexvar_epi16(side_by_side, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  for (int i = 0; i < 8; i += 2) {
    fours[i] = _mm512_unpacklo_epi32(pairs[i], pairs[i + 1]);
    fours[i + 1] = _mm512_unpackhi_epi32(pairs[i], pairs[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    eights[i] = _mm512_unpacklo_epi64(fours[i], fours[i + 2]);
    eights[i + 1] = _mm512_unpackhi_epi64(fours[i], fours[i + 2]);
    eights[i + 2] = _mm512_unpacklo_epi64(fours[i + 1], fours[i + 3]);
    eights[i + 3] = _mm512_unpackhi_epi64(fours[i + 1], fours[i + 3]);
  }
  /* Of eights[j] and eights[4 + j] the four quarters are the halves of m = j, 4 + j, 8 + j, 12 + j. */
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), last = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int j = 0; j < 4; j++) {
    const __m512i low = _mm512_permutex2var_epi64(eights[j], first, eights[4 + j]);
    const __m512i high = _mm512_permutex2var_epi64(eights[j], last, eights[4 + j]);
    const __m256i rows[4] = {_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1),
                             _mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1)};
    for (int i = 0; i < 4; i++)
      if (4 * i + j < left) _mm256_storeu_si256((__m256i *)(out + (4 * i + j) * stride), rows[i]);
  }
}

/* n_tiles · SIDE rows of the weight from n on, with m_tiles · SIDE tokens from m on; one or two of each. */
INLINE void multiply(const Job *job, int64_t n, int n_tiles, int64_t m, int m_tiles, float *sums) {
  const int64_t steps = job->k / DEPTH, row_bytes = job->k * 2;
  const uint16_t *w = job->w + n * job->k, *x = job->packed + m / SIDE * steps * TILE;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; step++) {
    _tile_loadd(4, w + step * DEPTH, row_bytes);
    _tile_loadd(6, x + step * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (n_tiles > 1) {
      _tile_loadd(5, w + SIDE * job->k + step * DEPTH, row_bytes);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (m_tiles > 1) {
      _tile_loadd(7, x + (steps + step) * TILE, 64);
      _tile_dpbf16ps(2, 4, 7);
      if (n_tiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  for (int j = 0; j < m_tiles; j++)
    for (int i = 0; i < n_tiles; i++)
      give(sums + (2 * j + i) * 256, job->out + (m + j * SIDE) * job->n + n + i * SIDE, job->n, job->m - m - j * SIDE);
}

INLINE void multiply_rows(const Job *job, int64_t n, int n_tiles, int64_t m, float *sums) {
  if (m + SIDE < job->m)
    multiply(job, n, n_tiles, m, 2, sums);
  else
    multiply(job, n, n_tiles, m, 1, sums);
}

static void multiply_items(Work *work, void *data, float *sums) {
  const Job *job = data;
  configure();
  for (int64_t item; (item = next_item(work)) >= 0; finish_item(work)) {
    const int64_t first = item * job->rows, end = first + job->rows < job->n ? first + job->rows : job->n;
    for (int64_t m = 0; m < job->m; m += 2 * SIDE)
      for (int64_t n = first; n < end; n += 2 * SIDE) {
        if (n + SIDE < end)
          multiply_rows(job, n, 2, m, sums);
        else
          multiply_rows(job, n, 1, m, sums);
      }
  }
  _tile_release();
}

static int has_right_shapes(const FfiCallFrame *frame) {
  FfiBuffer **a = frame->arguments.buffers;
  if (frame->arguments.size != 2 || frame->results.size != 1) return 0;
  for (int i = 0; i < 2; i++)
    if (a[i]->type != FFI_BFLOAT16 || a[i]->rank != 2) return 0;
  return a[0]->dims[1] == a[1]->dims[1] && a[0]->dims[1] % DEPTH == 0 && a[1]->dims[0] % SIDE == 0;
}

FfiError *tpugate_linear(FfiCallFrame *frame) {
  if (is_question(frame) || frame->stage != FFI_STAGE_EXECUTE) return NULL;
  if (!has_right_shapes(frame)) return fail(frame, FFI_ERROR_INVALID_ARGUMENT, "linear: shapes or types do not fit");
  const FfiBuffer *x = frame->arguments.buffers[0], *w = frame->arguments.buffers[1];
  const int64_t m = x->dims[0], n = w->dims[0], k = w->dims[1];
  uint16_t *out = frame->results.buffers[0]->data;
  if (!m || !n || !k) {
    memset(out, 0, m * n * sizeof *out);
    return NULL;
  }
  Job *job = malloc(sizeof *job);
  uint16_t *packed = aligned_alloc(64, (m + SIDE - 1) / SIDE * SIDE * k * sizeof *packed);
  if (!job || !packed) {
    free(job);
    free(packed);
    return fail(frame, FFI_ERROR_RESOURCE_EXHAUSTED, "linear: out of memory");
  }
  *job = (Job){w->data, out, packed, m, n, k, .rows = m <= FEW_TOKENS ? FEW_ROWS : MANY_ROWS};
  pack(job, x->data);
  const WorkPlan plan = {multiply_items, free_job, job, .num_items = (n + job->rows - 1) / job->rows,
                         .scratch_len = 4 * SIDE * SIDE};
  return share(frame, &plan);
}

int has_matrix_units(void) {
  static int answer = -1; /* asked once, by the one thread that loads the plugin */
  if (answer < 0) answer = syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, TILE_DATA) == 0;
  return answer;
}

#else

FfiError *tpugate_linear(FfiCallFrame *frame) { return NULL; } /* never registered */

int has_matrix_units(void) { return 0; }

#endif
