/* One pass over a float32 tensor: dense weights in, their N:M projection out, with FADES the pruned ones times a factor beside it. N, M
   and FADES are fixed at compile time.

   A column is one group: its M weights lie `inner` elements apart (inner = 1 for a linear layer's input dimension, kh * kw
   for a convolution's). LANES columns go through a selection network side by side, which the compiler turns into vector
   code; top[k] holds the (k+1)-th largest magnitude met so far. Ties keep the lower index, a NaN is kept on top of the N,
   and every zero written is +0.0: the same bits as nmrun.sparsity.masks. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 8
#pragma GCC target("prefer-vector-width=512") /* gcc prefers half of that, which takes 1.1 times as long */
#endif

#define LANES 16
#define BLOCK 256 /* columns of a group of rows that are put together */
#define AHEAD 512 /* elements: what is fetched into the cache while a column block is at work */

void nm_project(const float *restrict weight, float *restrict out, int64_t begin, int64_t end, int64_t inner, int soft,
                float scale, float factor) {
  for (int64_t column = begin; column < end; column += LANES) {
    int lanes = end - column < LANES ? (int)(end - column) : LANES;
    int together = inner == 1 && lanes == LANES; /* one piece of memory: with M as the stride it is loaded whole and shuffled */
    for (int j = 0; j < M * LANES; j += 16) { /* a cache line each; a prefetch past the end is harmless */
      __builtin_prefetch(weight + column * M + AHEAD + j);
      __builtin_prefetch(out + column * M + AHEAD + j, 1);
    }
    int64_t at = inner < LANES ? inner : column % inner; /* groups follow one another at every `inner` columns */
    /* M pieces of memory, each loaded whole: convolutions from 5x5 on, weights stored (in, out) */
    int row = !together && lanes == LANES && at + LANES <= inner;
    int64_t base = column / inner * M * inner + at, first[LANES];
    float w[M][LANES], top[N + 1][LANES];
    int32_t room[LANES];
    for (int l = 0; l < LANES && !together && !row; l++) {
      int64_t c = l < lanes ? column + l : end - 1; /* idle lanes repeat the last column and store nothing */
      first[l] = inner == 1 ? c * M : (c / inner) * M * inner + c % inner;
    }
    if (together)
      for (int l = 0; l < LANES; l++)
        for (int j = 0; j < M; j++) w[j][l] = weight[(column + l) * M + j];
    else if (row)
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) w[j][l] = weight[base + j * inner + l];
    else
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) w[j][l] = weight[first[l] + j * inner];
    for (int k = 0; k <= N; k++)
      for (int l = 0; l < LANES; l++) top[k][l] = -1.0f;
    for (int j = 0; j < M; j++)
      for (int l = 0; l < LANES; l++) {
        float x = fabsf(w[j][l]);
        for (int k = 0; k <= N; k++) {
          float larger = x > top[k][l] ? x : top[k][l];
          x = x > top[k][l] ? top[k][l] : x;
          top[k][l] = larger;
        }
      }
    for (int l = 0; l < LANES; l++) room[l] = N;
    for (int k = 0; k < N; k++)
      for (int l = 0; l < LANES; l++) room[l] -= top[k][l] > top[N - 1][l];
    for (int j = 0; j < M; j++)
      for (int l = 0; l < LANES; l++) {
        float x = fabsf(w[j][l]), shift = N < M && top[N][l] > 0.0f ? top[N][l] : 0.0f;
        int tie = (x == top[N - 1][l]) & (room[l] > 0);
        int keep = (x > top[N - 1][l]) | tie | (x != x);
        float kept = soft ? copysignf(x - shift, w[j][l]) * scale : w[j][l];
        room[l] -= tie;
        w[j][l] = (keep ? kept : FADES ? w[j][l] * factor : 0.0f) + 0.0f;
      }
    if (together)
      for (int l = 0; l < LANES; l++)
        for (int j = 0; j < M; j++) out[(column + l) * M + j] = w[j][l];
    else if (row)
      for (int j = 0; j < M; j++)
        for (int l = 0; l < LANES; l++) out[base + j * inner + l] = w[j][l];
    else
      for (int j = 0; j < M; j++)
        for (int l = 0; l < lanes; l++) out[first[l] + j * inner] = w[j][l];
  }
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
