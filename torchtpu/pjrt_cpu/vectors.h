/* Vectors of sixteen 4-byte numbers, and how to transpose sixteen of them. GCC's and clang's vector extensions. */
#ifndef TPUGATE_VECTORS_H
#define TPUGATE_VECTORS_H

#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
/* Exchanges the off-diagonal halves of all 2n × 2n squares: after n = 8, 4, 2, 1 the matrix is transposed. */
#define EXCHANGE(rows, n, LOW, HIGH)                                  \
  for (int i = 0; i < LANES; i++)                                     \
    if (!(i & n)) {                                                   \
      const Lanes low = SHUFFLE(rows[i], rows[i + n], LOW);           \
      rows[i + n] = SHUFFLE(rows[i], rows[i + n], HIGH);              \
      rows[i] = low;                                                  \
    }
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define TRANSPOSE(rows)       \
  EXCHANGE(rows, 8, LOW8, HIGH8) \
  EXCHANGE(rows, 4, LOW4, HIGH4) \
  EXCHANGE(rows, 2, LOW2, HIGH2) \
  EXCHANGE(rows, 1, LOW1, HIGH1)

#endif
