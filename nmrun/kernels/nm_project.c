/* One pass over a float32 tensor: dense weights in, their N:M projection out, with FADES the pruned ones times a factor beside it; or the
   mask, a byte a weight. N, M and FADES are fixed at compile time.

   A column is one group: its M weights lie `inner` elements apart (inner = 1 for a linear layer's input dimension, kh * kw
   for a convolution's). LANES columns go through a network side by side, which the compiler turns into vector code: top[k] is the
   (k+1)-th largest magnitude, found by insertion where N is small, else by sorting. Ties keep the lower index, a NaN is kept on top of
   the N, and every zero written is +0.0: the same bits as nmrun.sparsity.plain. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 8
#pragma GCC target("prefer-vector-width=512") /* gcc prefers half of that, which takes 1.1 times as long */
#endif

#define LANES 16
#define BLOCK 256 /* columns of a group of rows that are put together */
#define AHEAD 512 /* elements: what is fetched into the cache while a column block is at work */
#define SORTS (N > 14) /* gcc unrolls loops of up to 16 rounds: beyond, insertion takes four times as long as sorting */
#define TOPS (SORTS || N == M ? M : N + 1) /* how many of a group are put in order */

static inline __attribute__((always_inline)) float number(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline __attribute__((always_inline)) int32_t bits(float x) {
  int32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

/* Magnitudes are compared as whole numbers, their bits: the order is the same, and a NaN is made -1, smaller than all. */
static inline __attribute__((always_inline)) void exchange(int32_t *high, int32_t *low) {
  int32_t a[LANES], b[LANES];
  memcpy(a, high, sizeof a);
  memcpy(b, low, sizeof b);
  for (int l = 0; l < LANES; l++) high[l] = a[l] > b[l] ? a[l] : b[l];
  for (int l = 0; l < LANES; l++) low[l] = a[l] > b[l] ? b[l] : a[l];
}

/* The TOPS largest sizes of each lane, the largest first. */
static inline __attribute__((always_inline)) void order(int32_t size[][LANES], int32_t top[][LANES]) {
  if (!SORTS) {
    for (int k = 0; k < TOPS; k++)
      for (int l = 0; l < LANES; l++) top[k][l] = -1;
    for (int j = 0; j < M; j++)
      for (int l = 0; l < LANES; l++) {
        int32_t x = size[j][l];
        for (int k = 0; k < TOPS; k++) {
          int32_t larger = x > top[k][l] ? x : top[k][l];
          x = x > top[k][l] ? top[k][l] : x;
          top[k][l] = larger;
        }
      }
    return;
  }
  memcpy(top, size, M * LANES * sizeof(int32_t));
  int half = 1; /* Batcher's merge exchange, for any M: Knuth, The Art of Computer Programming 3, algorithm 5.2.2M */
  while (2 * half < M) half *= 2;
  for (int p = half; p > 0; p /= 2)
    for (int q = half, r = 0, d = p; d > 0; d = q - p, q /= 2, r = p)
      for (int i = 0; i < M - d; i++)
        if ((i & p) == r) exchange(top[i], top[i + d]);
}

/* Columns `begin` to `end`; with a mask, that alone is written. */
static inline __attribute__((always_inline)) void columns(const float *restrict weight, float *restrict out, uint8_t *restrict mask,
                                                          int64_t begin, int64_t end, int64_t inner, int soft, float scale,
                                                          float factor) {
  for (int64_t column = begin; column < end; column += LANES) {
    int lanes = end - column < LANES ? (int)(end - column) : LANES;
    int together = inner == 1 && lanes == LANES; /* one piece of memory: with M as the stride it is loaded whole and shuffled */
    for (int j = 0; j < M * LANES; j += 16) { /* a cache line each; a prefetch past the end is harmless */
      __builtin_prefetch(weight + column * M + AHEAD + j);
      if (!mask) __builtin_prefetch(out + column * M + AHEAD + j, 1);
    }
    int64_t at = inner < LANES ? inner : column % inner; /* groups follow one another at every `inner` columns */
    /* M pieces of memory, each loaded whole: convolutions from 5x5 on, weights stored (in, out) */
    int row = !together && lanes == LANES && at + LANES <= inner;
    int64_t base = column / inner * M * inner + at, first[LANES];
    int32_t w[M][LANES], size[M][LANES], top[TOPS][LANES], room[LANES], kept[M][LANES], whole[M * LANES];
    for (int l = 0; l < LANES && !together && !row; l++) {
      int64_t c = l < lanes ? column + l : end - 1; /* idle lanes repeat the last column and store nothing */
      first[l] = inner == 1 ? c * M : (c / inner) * M * inner + c % inner;
    }
    if (together)
      for (int l = 0; l < LANES; l++)
        for (int j = 0; j < M; j++) w[j][l] = bits(weight[(column + l) * M + j]);
    else if (row)
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) w[j][l] = bits(weight[base + j * inner + l]);
    else
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) w[j][l] = bits(weight[first[l] + j * inner]);
    for (int j = 0; j < M; j++)
      for (int l = 0; l < LANES; l++) {
        int32_t x = w[j][l] & 0x7fffffff;
        size[j][l] = x > 0x7f800000 ? -1 : x;
      }
    order(size, top);
    if (soft) {
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) {
          float left = fabsf(number(w[j][l])) - (N < M ? number(top[N % TOPS][l] < 0 ? 0 : top[N % TOPS][l]) : 0.0f);
          w[j][l] = bits(copysignf(left < 0.0f ? 0.0f : left, number(w[j][l])) * scale + 0.0f);
        }
    } else {
      for (int l = 0; l < LANES; l++) room[l] = N;
      for (int k = 0; k < N; k++)
        for (int l = 0; l < LANES; l++) room[l] -= top[k][l] > top[N - 1][l];
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) {
          int32_t x = size[j][l], tie = (x == top[N - 1][l]) & (room[l] > 0);
          room[l] -= tie;
          kept[j][l] = (x > top[N - 1][l]) | tie | (x < 0);
        }
      if (!mask)
        for (int j = 0; j < M; j++)
          for (int l = 0; l < LANES; l++) {
            float x = number(w[j][l]), rest = FADES ? x * factor : 0.0f;
            w[j][l] = bits((kept[j][l] ? x : rest) + 0.0f);
          }
    }
    if (mask) {
      if (together) {
        for (int l = 0; l < LANES; l++)
          for (int j = 0; j < M; j++) whole[l * M + j] = kept[j][l];
        for (int i = 0; i < M * LANES; i++) mask[column * M + i] = (uint8_t)whole[i];
      } else if (row)
        for (int j = 0; j < M; j++)
          for (int l = 0; l < LANES; l++) mask[base + j * inner + l] = (uint8_t)kept[j][l];
      else
        for (int j = 0; j < M; j++)
          for (int l = 0; l < lanes; l++) mask[first[l] + j * inner] = (uint8_t)kept[j][l];
    } else if (together)
      for (int l = 0; l < LANES; l++)
        for (int j = 0; j < M; j++) out[(column + l) * M + j] = number(w[j][l]);
    else if (row)
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) out[base + j * inner + l] = number(w[j][l]);
    else
      for (int j = 0; j < M; j++)
        for (int l = 0; l < lanes; l++) out[first[l] + j * inner] = number(w[j][l]);
  }
}

__attribute__((noinline)) void nm_project(const float *restrict weight, float *restrict out, int64_t begin, int64_t end, int64_t inner, int soft, float scale,
                float factor) {
  if (soft) columns(weight, out, 0, begin, end, inner, 1, scale, factor); /* each a loop of its own */
  else columns(weight, out, 0, begin, end, inner, 0, scale, factor);
}

void nm_mask(const float *restrict weight, uint8_t *restrict mask, int64_t begin, int64_t end, int64_t inner) {
  columns(weight, 0, mask, begin, end, inner, 0, 1.0f, 0.0f);
}

/* Groups `begin` to `end` of M rows each, row order[group * M + j] of `length` weights being the j-th of its group: the projection along
   the rows as if they stood in that order. */
void nm_project_rows(const float *restrict weight, float *restrict out, const int64_t *restrict order, int64_t begin, int64_t end,
                     int64_t length) {
  float from[M * BLOCK], to[M * BLOCK];
  for (int64_t group = begin; group < end; group++)
    for (int64_t column = 0; column < length; column += BLOCK) {
      int64_t count = length - column < BLOCK ? length - column : BLOCK;
      for (int j = 0; j < M; j++)
        memcpy(from + j * count, weight + order[group * M + j] * length + column, count * sizeof(float));
      nm_project(from, to, 0, count, count, 0, 1.0f, 0.0f);
      for (int j = 0; j < M; j++)
        memcpy(out + order[group * M + j] * length + column, to + j * count, count * sizeof(float));
    }
}
