/* One pass over a float32 tensor: dense weights in, their N:M projection out, with FADES the pruned ones times a factor beside it; or the
   mask, a byte a weight. N, M and FADES are fixed at compile time.

   A column is one group: its M weights lie `inner` elements apart (inner = 1 for a linear layer's input dimension, kh * kw
   for a convolution's). LANES columns go through a network side by side, which the compiler turns into vector code: the N-th largest
   magnitude is found among the N + 1 largest or the M - N + 1 smallest, put in order by insertion where these are few, else by sorting
   all. Ties keep the lower index, a NaN is kept on top of the N, and every zero written is +0.0: the same bits as
   nmrun.sparsity.reference. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 8
#pragma GCC target("prefer-vector-width=512") /* gcc prefers half of that, which takes 1.1 times as long */
#endif

#define LANES 16
#define BLOCK 256 /* columns of a group of rows that are put together */
#define PIECE 1024 /* elements: five streams of them fit into the first-level cache */
#define AHEAD 512 /* elements: what is fetched into the cache while a column block is at work */
#define FEWER (M - N < N ? M - N + 1 : N + 1)
#define SORTS (FEWER > 17) /* beyond, insertion takes more registers than there are */
#define FROM_BELOW (!SORTS && M - N < N)
#define SQUARES (M > LANES && M % LANES == 0) /* a group is several vectors: turned one at a time */
#define TOPS (SORTS ? M : FEWER)             /* how many of a group are put in order */
#define NTH (FROM_BELOW ? M - N : N - 1)     /* where the N-th largest is among them */
#define NEXT (FROM_BELOW ? M - N - 1 : N)    /* and the one after it, with N < M */

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

/* The TOPS largest sizes of each lane, the largest first; FROM_BELOW the smallest, the smallest first. */
static inline __attribute__((always_inline)) void order(int32_t size[][LANES], int32_t top[][LANES]) {
  if (!SORTS) {
    for (int k = 0; k < TOPS; k++)
      for (int l = 0; l < LANES; l++) top[k][l] = FROM_BELOW ? INT32_MAX : -1;
    for (int j = 0; j < M; j++)
      for (int l = 0; l < LANES; l++) {
        int32_t x = size[j][l];
#pragma GCC unroll 17
        for (int k = 0; k < TOPS; k++) {
          int32_t larger = x > top[k][l] ? x : top[k][l], smaller = x > top[k][l] ? top[k][l] : x;
          top[k][l] = FROM_BELOW ? smaller : larger;
          x = FROM_BELOW ? larger : smaller;
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

/* Whether in each lane just N are as large as the threshold. */
static inline __attribute__((always_inline)) int no_ties(int32_t size[][LANES], const int32_t *threshold) {
  int32_t count[LANES] = {0}, wrong = 0;
  for (int j = 0; j < M; j++)
    for (int l = 0; l < LANES; l++) count[l] += size[j][l] >= threshold[l];
  for (int l = 0; l < LANES; l++) wrong |= count[l] ^ N;
  return !wrong;
}

/* One group without ties, as it lies in memory. */
static inline __attribute__((always_inline)) void in_order(const float *restrict weight, int32_t threshold, float *restrict out,
                                                           uint8_t *restrict mask, float factor) {
  for (int j = 0; j < M; j++) {
    int32_t x = bits(weight[j]) & 0x7fffffff, keep = (x >= threshold) | (x > 0x7f800000);
    if (mask) mask[j] = (uint8_t)keep;
    else out[j] = (keep ? weight[j] : FADES ? weight[j] * factor : 0.0f) + 0.0f;
  }
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
    int32_t w[M][LANES], size[M][LANES], top[TOPS][LANES], room[LANES], keep[M][LANES], whole[M * LANES];
    for (int l = 0; l < LANES && !together && !row; l++) {
      int64_t c = l < lanes ? column + l : end - 1; /* idle lanes repeat the last column and store nothing */
      first[l] = inner == 1 ? c * M : (c / inner) * M * inner + c % inner;
    }
    if (together && SQUARES)
      for (int part = 0; part < M; part += LANES) /* gcc turns such squares, but nothing larger */
        for (int l = 0; l < LANES; l++)
          for (int j = 0; j < LANES; j++) w[part + j][l] = bits(weight[(column + l) * M + part + j]);
    else if (together)
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
          float left = fabsf(number(w[j][l])) - (N < M ? number(top[NEXT % TOPS][l] < 0 ? 0 : top[NEXT % TOPS][l]) : 0.0f);
          w[j][l] = bits(copysignf(left < 0.0f ? 0.0f : left, number(w[j][l])) * scale + 0.0f);
        }
    } else {
      if (together && SQUARES && no_ties(size, top[NTH])) {
        for (int l = 0; l < LANES; l++) {
          int64_t begins = (column + l) * M;
          in_order(weight + begins, top[NTH][l], mask ? 0 : out + begins, mask ? mask + begins : 0, factor);
        }
        continue;
      }
      for (int l = 0; l < LANES; l++) room[l] = N;
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) room[l] -= size[j][l] > top[NTH][l];
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) {
          int32_t x = size[j][l], tie = (x == top[NTH][l]) & (room[l] > 0);
          room[l] -= tie;
          keep[j][l] = (x > top[NTH][l]) | tie | (x < 0);
        }
      if (!mask)
        for (int j = 0; j < M; j++)
          for (int l = 0; l < LANES; l++) {
            float x = number(w[j][l]), rest = FADES ? x * factor : 0.0f;
            w[j][l] = bits((keep[j][l] ? x : rest) + 0.0f);
          }
    }
    if (mask) {
      if (together) {
        for (int l = 0; l < LANES; l++)
          for (int j = 0; j < M; j++) whole[l * M + j] = keep[j][l];
        for (int i = 0; i < M * LANES; i++) mask[column * M + i] = (uint8_t)whole[i];
      } else if (row)
        for (int j = 0; j < M; j++)
          for (int l = 0; l < LANES; l++) mask[base + j * inner + l] = (uint8_t)keep[j][l];
      else
        for (int j = 0; j < M; j++)
          for (int l = 0; l < lanes; l++) mask[first[l] + j * inner] = (uint8_t)keep[j][l];
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

/* The projection; numbers: factor and scale. */
__attribute__((noinline)) int nm_project(const float *restrict weight, float *restrict out, int64_t begin, int64_t end, int64_t inner, int soft,
                                         const float *numbers) {
  if (soft) columns(weight, out, 0, begin, end, inner, 1, numbers[1], numbers[0]); /* each a loop of its own */
  else columns(weight, out, 0, begin, end, inner, 0, numbers[1], numbers[0]);
  return 0;
}

int nm_mask(const float *restrict weight, uint8_t *restrict mask, int64_t begin, int64_t end, int64_t inner) {
  columns(weight, 0, mask, begin, end, inner, 0, 1.0f, 0.0f);
  return 0;
}

/* Groups `begin` to `end` of M rows each, row order[group * M + j] of `length` weights being the j-th of its group: the projection along
   the rows as if they stood in that order. */
int nm_project_rows(const float *restrict weight, float *restrict out, const int64_t *restrict order, int64_t begin, int64_t end,
                     int64_t length) {
  const float plain[2] = {0.0f, 1.0f};
  float from[M * BLOCK], to[M * BLOCK];
  for (int64_t group = begin; group < end; group++)
    for (int64_t column = 0; column < length; column += BLOCK) {
      int64_t count = length - column < BLOCK ? length - column : BLOCK;
      for (int j = 0; j < M; j++)
        memcpy(from + j * count, weight + order[group * M + j] * length + column, count * sizeof(float));
      nm_project(from, to, 0, count, count, 0, plain);
      for (int j = 0; j < M; j++)
        memcpy(out + order[group * M + j] * length + column, to + j * count, count * sizeof(float));
    }
  return 0;
}

/* nm_adam of nm_adam.c, for `count` elements. */
typedef void Update(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t count,
                    const void *scalars, int edit, int frozen);

/* A step of Adam of rows `begin` to `end`, M * inner elements each; with a mask it is what is kept, else the N largest of M. */
int nm_step(Update *update, float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t begin,
            int64_t end, int64_t inner, int64_t gap, const void *scalars, int edit, int frozen, int soft, const float *numbers) {
  (void)gap;
  int64_t row = M * inner, rows = row < PIECE ? PIECE / row : 1;
  for (int64_t r = begin; r < end; r += rows) {
    int64_t last = r + rows < end ? r + rows : end, at = r * row;
    update(weight + at, grad + at, first + at, second + at, out + at, mask ? mask + at : 0, (last - r) * row, scalars, edit, frozen);
    if (!mask) nm_project(weight, out, r * inner, last * inner, inner, soft, numbers);
  }
  return 0;
}
