/* One pass over a float32 tensor: dense weights in, their V:N:M projection out, with FADES the pruned ones times a factor beside it; or the
   mask, a byte a weight. N, M, V and FADES are fixed at compile time. It takes the place of nm_project.c.

   A block is V outputs of M inputs: all V keep the SHARED inputs whose sums of magnitudes are the largest, and of these each output keeps
   its N largest. Neighbours of a group lie `inner` elements apart, the outputs of a block `gap`. Where the outputs are the first dimension,
   `gap` is the larger: their rows are read as they lie in memory, so nothing is turned and the loops are vector code. Sums are doubles, added
   output by output. Ties keep the lower index, a NaN is kept on top of the N, and every zero written is +0.0: the same bits as
   nmrun.sparsity.reference. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 8
#pragma GCC target("prefer-vector-width=512")
#endif

#define SHARED 4
#define LANES 16
#define ROWS (V % 4 ? 1 : 4)
#define MOST 16384 /* elements of a group's whole lines, and of V outputs of M inputs */
/* elements of an output that are worked on together: those of a block stay in the second-level cache */
#define STRIP (131072 / V < MOST ? 131072 / V : MOST)

/* A part of the tensor in which blocks are whole: `count` pieces of `length` elements, `stride` apart. */
typedef struct {
  int64_t at, count, stride, length;
} Tile;

static inline __attribute__((always_inline)) int32_t magnitude(float x) {
  int32_t b;
  memcpy(&b, &x, sizeof b);
  b &= 0x7fffffff;
  return b > 0x7f800000 ? -1 : b; /* a NaN is smaller than all */
}

/* The tiles of a step of the outermost loop: V outputs, or where outputs are inside, M inputs. */
static inline int64_t tiles(int64_t inner, int64_t gap) {
  if (inner > gap) return inner / (V * gap);
  int64_t line = M * inner, strip = line < STRIP ? STRIP / line * line : line;
  return (gap + strip - 1) / strip;
}

static inline Tile tile(int64_t step, int64_t i, int64_t inner, int64_t gap) {
  if (inner > gap) return (Tile){step * M * inner + i * V * gap, M, inner, V * gap};
  int64_t line = M * inner, strip = line < STRIP ? STRIP / line * line : line, left = gap - i * strip;
  return (Tile){step * V * gap + i * strip, V, gap, left < strip ? left : strip};
}

/* Write what is left of weight `i`; a NaN is kept anyway. */
static inline __attribute__((always_inline)) void put(int64_t i, const float *restrict weight, int keep, float *restrict out,
                                                      uint8_t *restrict mask, float factor) {
  float x = weight[i];
  keep |= x != x;
  if (mask) mask[i] = (uint8_t)keep;
  else out[i] = (keep ? x : FADES ? x * factor : 0.0f) + 0.0f;
}

/* The N-th largest magnitude of each group among the shared ones; returns whether in some group more than N are as large. */
static inline __attribute__((always_inline)) int thresholds(const float *restrict weight, const int32_t *restrict places, int64_t groups,
                                                            int32_t *restrict nth) {
  int32_t s[SHARED][MOST / M]; /* vectors are read of it long after its numbers were written one by one */
  int32_t ties = 0;
  for (int64_t g = 0; g < groups; g++)
    for (int k = 0; k < SHARED; k++) memcpy(s[k] + g, weight + places[g * SHARED + k], sizeof(float));
  for (int k = 0; k < SHARED; k++)
    for (int64_t g = 0; g < groups; g++) {
      int32_t x = s[k][g] & 0x7fffffff;
      s[k][g] = x > 0x7f800000 ? -1 : x;
    }
  for (int64_t g = 0; g < groups; g++) {
    int32_t a = s[0][g] > s[1][g] ? s[0][g] : s[1][g], b = s[0][g] > s[1][g] ? s[1][g] : s[0][g];
    int32_t c = s[2][g] > s[3][g] ? s[2][g] : s[3][g], d = s[2][g] > s[3][g] ? s[3][g] : s[2][g];
    int32_t least = a < c ? a : c, most = b > d ? b : d; /* the second and third, one way or the other */
    int32_t x = N == 1 ? (a > c ? a : c) : N == 2 ? (least > most ? least : most) : (least > most ? most : least);
    ties |= ((s[0][g] >= x) + (s[1][g] >= x) + (s[2][g] >= x) + (s[3][g] >= x)) ^ N;
    nth[g] = x;
  }
  return ties != 0;
}

/* One row of a block. */
static inline __attribute__((always_inline)) void row_of_block(const float *restrict weight, float *restrict out, uint8_t *restrict mask,
                                                               const int32_t *restrict shared, const int32_t *restrict places,
                                                               int64_t length, int64_t inner, float factor) {
  int64_t groups = length / M;
  int32_t nth[MOST / M];
  if (N == SHARED) {
    for (int64_t i = 0; i < length; i++) put(i, weight, shared[i], out, mask, factor);
  } else if (thresholds(weight, places, groups, nth)) {
    for (int64_t i = 0; i < length; i++) put(i, weight, 0, out, mask, factor);
    for (int64_t g = 0; g < groups; g++)
      for (int k = 0; k < SHARED; k++) {
        const int32_t *at = places + g * SHARED;
        int32_t size = magnitude(weight[at[k]]), larger = 0;
        for (int j = 0; j < SHARED; j++) larger += j < k ? magnitude(weight[at[j]]) >= size : magnitude(weight[at[j]]) > size;
        put(at[k], weight, larger < N, out, mask, factor);
      }
  } else if (inner == 1) {
    for (int64_t g = 0; g < groups; g++)
      for (int j = 0; j < M; j++)
        put(g * M + j, weight, shared[g * M + j] & (magnitude(weight[g * M + j]) >= nth[g]), out, mask, factor);
  } else {
    for (int64_t line = 0; line < groups / inner; line++)
      for (int j = 0; j < M; j++)
        for (int64_t g = line * inner; g < (line + 1) * inner; g++) {
          int64_t i = (line * (M - 1) + j) * inner + g;
          put(i, weight, shared[i] & (magnitude(weight[i]) >= nth[g]), out, mask, factor);
        }
  }
}

/* The shared inputs of every group, in their order, by the sums of magnitudes: LANES groups side by side. */
static inline __attribute__((always_inline)) void choose(const double *restrict total, int64_t groups, int64_t inner, int32_t *restrict shared,
                                                         int32_t *restrict places) {
  for (int64_t group = 0; group < groups; group += LANES) {
    int64_t first[LANES];
    int32_t at[SHARED][LANES], place[LANES], moves[LANES];
    double top[SHARED][LANES], x[LANES];
    for (int l = 0; l < LANES; l++) {
      int64_t g = group + l < groups ? group + l : groups - 1;
      first[l] = inner == 1 ? g * M : g / inner * M * inner + g % inner;
      for (int k = 0; k < SHARED; k++) top[k][l] = -INFINITY, at[k][l] = 0;
    }
    for (int j = 0; j < M; j++) {
      for (int l = 0; l < LANES; l++) x[l] = total[first[l] + j * inner], place[l] = j, moves[l] = 0;
      for (int k = 0; k < SHARED; k++) /* from where it is larger on, all move on by one */
        for (int l = 0; l < LANES; l++) {
          double there = top[k][l];
          int32_t its = at[k][l], move = moves[l] | (x[l] > there);
          top[k][l] = move ? x[l] : there, at[k][l] = move ? place[l] : its;
          x[l] = move ? there : x[l], place[l] = move ? its : place[l];
          moves[l] = move;
        }
    }
    static const uint8_t sorts[5][2] = {{0, 1}, {2, 3}, {0, 2}, {1, 3}, {1, 2}};
    for (int i = 0; i < 5; i++)
      for (int l = 0; l < LANES; l++) {
        int32_t a = at[sorts[i][0]][l], b = at[sorts[i][1]][l];
        at[sorts[i][0]][l] = a < b ? a : b, at[sorts[i][1]][l] = a < b ? b : a;
      }
    for (int l = 0; l < LANES && group + l < groups; l++)
      for (int k = 0; k < SHARED; k++) {
        int32_t place_of = (int32_t)(first[l] + at[k][l] * inner);
        places[(group + l) * SHARED + k] = place_of, shared[place_of] = 1;
      }
  }
}

/* The magnitudes of ROWS rows, one after the other. */
static inline __attribute__((always_inline)) void add(double *restrict total, const float *restrict weight, int64_t length, int64_t gap) {
  for (int64_t i = 0; i < length; i++) {
    double sum = total[i];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      float x = fabsf(weight[r * gap + i]);
      sum += x != x ? -1.0f : x;
    }
    total[i] = sum;
  }
}

/* V rows, `gap` apart, of `length` elements, the same lines of all of them, by the sums of their magnitudes. */
static inline __attribute__((always_inline)) void any_block(const float *restrict weight, float *restrict out, uint8_t *restrict mask,
                                                        const double *restrict total, int64_t length, int64_t inner, int64_t gap,
                                                        float factor) {
  int32_t shared[MOST], places[MOST / M * SHARED];
  memset(shared, 0, length * sizeof *shared);
  choose(total, length / M, inner, shared, places);
  for (int r = 0; r < V; r++)
    row_of_block(weight + r * gap, mask ? 0 : out + r * gap, mask ? mask + r * gap : 0, shared, places, length, inner, factor);
}

static __attribute__((noinline)) void block(const float *restrict weight, float *restrict out, const double *restrict total, int64_t length,
                                            int64_t inner, int64_t gap, float factor) {
  any_block(weight, out, 0, total, length, inner, gap, factor);
}

/* The same of a tile whose outputs are inside: its blocks are turned, one after the other. */
static inline __attribute__((always_inline)) void turned(const float *restrict weight, float *restrict out, uint8_t *restrict mask,
                                                         int64_t inner, int64_t gap, float factor) {
  float from[V * M], to[V * M];
  uint8_t kept[V * M];
  for (int64_t i = 0; i < gap; i++) {
    double total[M] = {0};
    for (int j = 0; j < M; j++)
      for (int r = 0; r < V; r++) from[r * M + j] = weight[i + j * inner + r * gap];
    for (int r = 0; r < V; r += ROWS) add(total, from + r * M, M, M);
    if (mask) any_block(from, 0, kept, total, M, 1, M, factor);
    else block(from, to, total, M, 1, M, factor);
    for (int j = 0; j < M; j++)
      for (int r = 0; r < V; r++)
        if (mask) mask[i + j * inner + r * gap] = kept[r * M + j];
        else out[i + j * inner + r * gap] = to[r * M + j];
  }
}

static inline __attribute__((always_inline)) void tile_at(const float *restrict weight, float *restrict out, uint8_t *restrict mask, Tile t,
                                                          int64_t inner, int64_t gap, float factor) {
  double total[MOST];
  weight += t.at, out = mask ? 0 : out + t.at, mask = mask ? mask + t.at : 0;
  if (inner > gap) {
    turned(weight, out, mask, inner, gap, factor);
    return;
  }
  memset(total, 0, t.length * sizeof *total);
  for (int r = 0; r < V; r += ROWS) add(total, weight + r * gap, t.length, gap);
  if (mask) any_block(weight, 0, mask, total, t.length, inner, gap, factor);
  else block(weight, out, total, t.length, inner, gap, factor);
}

/* Steps `begin` to `end` of the outermost loop. */
int nm_project_blocks(const float *restrict weight, float *restrict out, int64_t begin, int64_t end, int64_t inner, int64_t gap,
                      const float *factor) {
  for (int64_t step = begin; step < end; step++)
    for (int64_t i = 0; i < tiles(inner, gap); i++) tile_at(weight, out, 0, tile(step, i, inner, gap), inner, gap, *factor);
  return 0;
}

int nm_mask_blocks(const float *restrict weight, uint8_t *restrict mask, int64_t begin, int64_t end, int64_t inner, int64_t gap) {
  for (int64_t step = begin; step < end; step++)
    for (int64_t i = 0; i < tiles(inner, gap); i++) tile_at(weight, 0, mask, tile(step, i, inner, gap), inner, gap, 0.0f);
  return 0;
}

/* nm_adam of nm_adam.c, for `count` elements. */
typedef void Update(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t count,
                    const void *scalars, int edit, int frozen);

/* A step of Adam of steps `begin` to `end`; with a mask it is what is kept, else what V:N:M keeps. There is no soft threshold. */
int nm_step(Update *update, float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t begin,
            int64_t end, int64_t inner, int64_t gap, const void *scalars, int edit, int frozen, int soft, const float *numbers) {
  (void)soft;
  for (int64_t step = begin; step < end; step++)
    for (int64_t i = 0; i < tiles(inner, gap); i++) {
      Tile t = tile(step, i, inner, gap);
      double total[MOST];
      if (inner <= gap) memset(total, 0, t.length * sizeof *total);
      for (int64_t c = 0, at = t.at; c < t.count; c++, at += t.stride) {
        update(weight + at, grad + at, first + at, second + at, out + at, mask ? mask + at : 0, t.length, scalars, edit, frozen);
        if (!mask && inner <= gap && (c + 1) % ROWS == 0) /* while they are in the first-level cache */
          add(total, weight + at - (ROWS - 1) * gap, t.length, gap);
      }
      if (mask) continue;
      if (inner > gap) turned(weight + t.at, out + t.at, 0, inner, gap, *numbers);
      else block(weight + t.at, out + t.at, total, t.length, inner, gap, *numbers);
    }
  return 0;
}
