/* Products of bfloat16 with a V:N:M matrix, on one thread. Follows nm_scratch.c, nm_vectors.c and nm_tiles.c in one translation unit. Needs
   AVX-512 with BF16; without it this file is empty, unless EMULATED has the instruction written out, for tests on other processors.

   A group of V rows shares its columns, so it is a small dense matrix: counts[group] columns, filled up with zeros to whole tiles of TILE
   rows and DEEP columns. There is room for `padded` columns. Tiles lie one after another, by group, then by row, then by column. PANEL tokens
   are turned once, to rows of one column and PANEL tokens. For a group its columns are gathered from these by two loads, two interleavings
   and two stores for two columns: that is what the instructions read, a pair of columns of 16 tokens in a register. Interleaving leaves the
   tokens in the order of `token_of`. Behind the last column there is one of zeros, for what fills up.

   The transpose of such a matrix has the transposes of its groups, whose products are scattered: added to sums of all columns, the groups in
   their order. Its tiles are of TILE columns and DEEP rows.

   With `by_tiles` the products are those of AMX, four at once, and the next group is gathered between them; else vdpbf16ps multiplies a
   pair of a row with 16 tokens. Either adds up a token's products in its own order: its bits depend on nothing but the operands. */
#if LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VL__) && (defined(__AVX512BF16__) || defined(EMULATED))
#include <immintrin.h>

#define TILE 16
#define DEEP 32
#define PANEL 32
#define ROWS 8 /* at once: their sums for a panel are 16 registers */

/* To bfloat16, ties to even; a NaN stays one. */
static inline __m256i low(__m512 v) {
#if defined(EMULATED)
  return (__m256i)narrowed((vec)v);
#else
  return (__m256i)_mm512_cvtneps_pbh(v);
#endif
}

static inline int64_t tiles_of(int64_t count, int64_t of) { return (count + of - 1) / of; }

static inline int token_of(int half, int lane) { return lane / 4 * 8 + half * 4 + lane % 4; }

/* Columns k to k + DEEP of PANEL tokens of x (tokens, columns): a[half][pair of columns], the tokens of a half side by side; what is missing
   is zero. */
static inline void turn_some(const uint16_t *x, int64_t tokens, int64_t columns, int64_t k, vec a[2][LANES]) {
  int64_t left = columns - k;
  __mmask32 keep = left >= DEEP ? 0xffffffff : (1u << left) - 1;
  for (int half = 0; half < 2; half++) {
    for (int t = 0; t < LANES; t++)
      a[half][t] = half * LANES + t < tokens ? (vec)_mm512_maskz_loadu_epi16(keep, x + (half * LANES + t) * columns + k) : (vec){0};
    turn(a[half]);
  }
}

/* pairs[pair of columns][half][16 tokens][2], with zeros up to a whole tile. */
static void turn_pairs(const uint16_t *x, int64_t tokens, int64_t columns, uint16_t *pairs) {
  for (int64_t k = 0; k < columns; k += DEEP) {
    vec a[2][LANES];
    turn_some(x, tokens, columns, k, a);
    for (int i = 0; i < LANES; i++)
      for (int half = 0; half < 2; half++) _mm512_store_si512(pairs + (k + 2 * i + half) * PANEL, (__m512i)a[half][i]);
  }
}

/* panel[column][token], and behind it a column of zeros. */
static void turn_panel(const uint16_t *x, int64_t tokens, int64_t columns, uint16_t *panel) {
  uint16_t pick[2][PANEL];
  for (int i = 0; i < PANEL; i++) pick[0][i] = (uint16_t)(2 * i), pick[1][i] = (uint16_t)(2 * i + 1);
  __m512i even = _mm512_loadu_si512(pick[0]), odd = _mm512_loadu_si512(pick[1]);
  for (int64_t k = 0; k < columns; k += DEEP) {
    vec a[2][LANES];
    turn_some(x, tokens, columns, k, a);
    for (int64_t i = 0; i < LANES && k + 2 * i < columns; i++) {
      __m512i first = (__m512i)a[0][i], second = (__m512i)a[1][i];
      _mm512_store_si512(panel + (k + 2 * i) * PANEL, _mm512_permutex2var_epi16(first, even, second));
      if (k + 2 * i + 1 < columns) _mm512_store_si512(panel + (k + 2 * i + 1) * PANEL, _mm512_permutex2var_epi16(first, odd, second));
    }
  }
  _mm512_store_si512(panel + columns * PANEL, _mm512_setzero_si512());
}

/* Pairs `begin` to `end` of a group's columns: pairs[pair][half][16 tokens][2]. */
static inline __attribute__((always_inline)) void gather(const uint16_t *panel, const int32_t *index, int64_t begin, int64_t end,
                                                         uint16_t *pairs) {
  for (int64_t p = begin; p < end; p++) {
    __m512i a = _mm512_load_si512(panel + (int64_t)index[2 * p] * PANEL), b = _mm512_load_si512(panel + (int64_t)index[2 * p + 1] * PANEL);
    _mm512_store_si512(pairs + p * 2 * PANEL, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(pairs + p * 2 * PANEL + PANEL, _mm512_unpackhi_epi16(a, b));
  }
}

/* Two numbers in all lanes. */
static inline __m512i pair_of(const uint16_t *from) {
  int32_t pair;
  memcpy(&pair, from, sizeof pair);
  __m512i all = _mm512_set1_epi32(pair);
#if defined(__clang__) /* whose release 16 crashes where the product would load the pair itself */
  __asm__("" : "+v"(all));
#endif
  return all;
}

/* sums[row][half][16 tokens] of a tile of rows; its tiles of columns lie one after another. */
static void multiply_by_vectors(const uint16_t *values, const uint16_t *pairs, int64_t count, float *sums) {
  for (int first = 0; first < TILE; first += ROWS) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < count; p++) {
      const uint16_t *w = values + p / (DEEP / 2) * TILE * DEEP + first * DEEP + p % (DEEP / 2) * 2;
      __m512i a = _mm512_load_si512(pairs + p * 2 * PANEL), b = _mm512_load_si512(pairs + p * 2 * PANEL + PANEL);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        __m512i both = pair_of(w + r * DEEP);
        sum[r][0] = dot(sum[r][0], both, a), sum[r][1] = dot(sum[r][1], both, b);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++) _mm512_store_ps(sums + (first + r) * PANEL + half * LANES, sum[r][half]);
  }
}

/* One tile of rows for a panel of tokens: turned, with the bias, rounded. `straight`: tokens lie in their own order. */
static inline __attribute__((always_inline)) void put_tile(const float *sums, const float *bias, int64_t row, int64_t rows, int64_t tokens,
                                                           int straight, uint16_t *y) {
  int64_t left = rows - row;
  __mmask16 keep = left >= TILE ? 0xffff : (__mmask16)((1u << left) - 1);
  __m512 add = bias == NULL ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(keep, bias + row);
  for (int half = 0; half < (straight ? tiles_of(tokens, LANES) : 2); half++) {
    vec a[LANES];
    for (int r = 0; r < TILE; r++) a[r] = (vec)_mm512_load_ps(sums + r * PANEL + half * LANES);
    turn(a);
    for (int l = 0; l < LANES; l++) {
      int64_t t = straight ? half * LANES + l : token_of(half, l);
      if (t < tokens) _mm256_mask_storeu_epi16(y + t * rows + row, keep, low(_mm512_add_ps((__m512)a[l], add)));
    }
  }
}

#if defined(HAS_TILES)
typedef struct {
  const uint16_t *panel;
  const int32_t *index;
  uint16_t *pairs;
  int64_t done, count; /* of pairs */
} Gathering;

static inline void gather_some(Gathering *g, int64_t pairs) {
  int64_t end = g->done + pairs < g->count ? g->done + pairs : g->count;
  gather(g->panel, g->index, g->done, end, g->pairs);
  g->done = end;
}

/* The same of one tile of rows, or of two, `deep` tiles of columns each; meanwhile `some` pairs of the next group are gathered a tile. */
static void multiply_by_tiles(const uint16_t *values, const uint16_t *second, const uint16_t *pairs, int64_t deep, float *sums,
                              Gathering *next, int64_t some) {
  const int size = TILE * DEEP, line = 4 * PANEL; /* elements, bytes */
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < deep; k++) {
    LOAD_TILE(4, values + k * size, 2 * DEEP);
    LOAD_TILE(6, pairs + k * DEEP * PANEL, line);
    _tile_dpbf16ps(0, 4, 6);
    LOAD_TILE(7, pairs + k * DEEP * PANEL + PANEL, line);
    _tile_dpbf16ps(1, 4, 7);
    if (next != NULL) gather_some(next, some);
    if (second != NULL) {
      LOAD_TILE(5, second + k * size, 2 * DEEP);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + LANES, line);
  if (second != NULL) {
    _tile_stored(2, sums + TILE * PANEL, line);
    _tile_stored(3, sums + TILE * PANEL + LANES, line);
  }
}

static void panel_by_tiles(const uint16_t *panel, uint16_t *pairs, const float *bias, const uint16_t *values, const int32_t *index,
                           const int32_t *counts, int64_t rows, int64_t height, int64_t padded, int64_t tokens, int64_t begin, int64_t end,
                           uint16_t *y) {
  _Alignas(64) float sums[2 * TILE * PANEL];
  int64_t tiles = height / TILE;
  uint16_t *now = pairs, *other = pairs + padded * PANEL;
  gather(panel, index + begin * padded, 0, tiles_of(counts[begin], DEEP) * DEEP / 2, now);
  for (int64_t g = begin; g < end; g++) {
    int64_t deep = tiles_of(counts[g], DEEP), coming = g + 1 < end ? tiles_of(counts[g + 1], DEEP) * DEEP / 2 : 0;
    int64_t steps = (tiles + 1) / 2 * deep, some = steps ? (coming + steps - 1) / steps : 0;
    Gathering next = {panel, index + (g + 1) * padded, other, 0, coming};
    for (int64_t i = 0; i < tiles; i += 2) {
      int two = i + 1 < tiles;
      const uint16_t *w = values + (g * height + i * TILE) * padded;
      multiply_by_tiles(w, two ? w + TILE * padded : NULL, now, deep, sums, &next, some);
      for (int64_t j = 0; j <= two; j++) {
        int64_t row = g * height + (i + j) * TILE;
        if (row < rows) put_tile(sums + j * TILE * PANEL, bias, row, rows, tokens, 0, y);
      }
    }
    gather_some(&next, coming); /* of a group that keeps nothing */
    uint16_t *before = now;
    now = other, other = before;
  }
}
#endif

/* y = x S^T + bias for tokens `first` to `last` and groups `begin` to `end` of S (rows, columns), `height` rows each, a multiple of TILE: x
   is (tokens, columns), y (tokens, rows), bfloat16, and the bias float32 or NULL. index is (groups, padded), the columns of each group,
   behind its counts[] of them `columns` up to a whole tile; DEEP divides padded. Returns 0, or 1 without memory. */
int nm_block_bf16(const uint16_t *x, uint16_t *y, const float *bias, const uint16_t *values, const int32_t *index, const int32_t *counts,
                  int64_t rows, int64_t columns, int64_t height, int64_t padded, int64_t by_tiles, int64_t first, int64_t last,
                  int64_t begin, int64_t end) {
  uint16_t *panel = (uint16_t *)scratch((columns + 1 + 2 * padded) * PANEL / 2), *pairs = panel + (columns + 1) * PANEL;
  if (panel == NULL) return 1;
  begin_tiles(by_tiles);
  for (int64_t t = first; t < last; t += PANEL) {
    int64_t tokens = last - t < PANEL ? last - t : PANEL;
    turn_panel(x + t * columns, tokens, columns, panel);
#if defined(HAS_TILES)
    if (by_tiles) {
      panel_by_tiles(panel, pairs, bias, values, index, counts, rows, height, padded, tokens, begin, end, y + t * rows);
      continue;
    }
#endif
    for (int64_t g = begin; g < end; g++) {
      _Alignas(64) float sums[TILE * PANEL];
      int64_t pairs_of = (counts[g] + 1) / 2;
      gather(panel, index + g * padded, 0, pairs_of, pairs);
      for (int64_t row = g * height; row < (g + 1) * height && row < rows; row += TILE) {
        multiply_by_vectors(values + row * padded, pairs, pairs_of, sums);
        put_tile(sums, bias, row, rows, tokens, 0, y + t * rows);
      }
    }
  }
  end_tiles(by_tiles);
  return 0;
}

/* y = x S for tokens `first` to `last`: x is (tokens, rows), y (tokens, columns), bfloat16; `height` divides rows. The tiles are those of
   the transpose, (groups, padded / TILE, height / DEEP rounded up). */
int nm_block_bf16_turned(const uint16_t *x, uint16_t *y, const uint16_t *values, const int32_t *index, const int32_t *counts, int64_t rows,
                         int64_t columns, int64_t height, int64_t padded, int64_t by_tiles, int64_t first, int64_t last) {
  int64_t deep = tiles_of(height, DEEP), wide = tiles_of(columns, TILE) * TILE + 1; /* behind them is what fills up */
  float *sums = scratch(wide * PANEL + (rows + DEEP) * PANEL / 2);
  uint16_t *pairs = (uint16_t *)(sums + wide * PANEL);
  if (sums == NULL) return 1;
  begin_tiles(by_tiles);
  memset(pairs + rows * PANEL, 0, DEEP * PANEL * sizeof *pairs);
  for (int64_t t = first; t < last; t += PANEL) {
    int64_t tokens = last - t < PANEL ? last - t : PANEL;
    turn_pairs(x + t * rows, tokens, rows, pairs);
    memset(sums, 0, wide * PANEL * sizeof *sums);
    for (int64_t g = 0; g < rows / height; g++) {
      const int32_t *to = index + g * padded;
      int64_t tiles = tiles_of(counts[g], TILE), step = deep * TILE * DEEP;
      for (int64_t i = 0; i < tiles; i++) {
        _Alignas(64) float some[2 * TILE * PANEL];
        const uint16_t *w = values + (g * (padded / TILE) + i) * step;
        int count = 1;
#if defined(HAS_TILES)
        if (by_tiles) {
          count += i + 1 < tiles;
          multiply_by_tiles(w, count == 2 ? w + step : NULL, pairs + g * height * PANEL, deep, some, NULL, 0);
        } else
#endif
          multiply_by_vectors(w, pairs + g * height * PANEL, height / 2, some);
        for (int r = 0; r < count * TILE; r++) {
          int64_t column = to[i * TILE + r];
          float *sum = sums + (column < columns ? column : wide - 1) * PANEL;
          for (int half = 0; half < 2; half++)
            _mm512_store_ps(sum + half * LANES, _mm512_add_ps(_mm512_load_ps(sum + half * LANES), _mm512_load_ps(some + r * PANEL + half * LANES)));
        }
        i += count - 1;
      }
    }
    for (int64_t k = 0; k < columns; k += TILE) put_tile(sums + k * PANEL, NULL, k, columns, tokens, 1, y + t * columns);
  }
  end_tiles(by_tiles);
  return 0;
}

/* out (rows, columns) at the shared columns of groups `begin` to `end`: y^T x, x (tokens, columns), y (tokens, rows), in bfloat16, out in
   float32. Two tokens are a pair; 16 columns of a group lie in the lanes. */
int nm_block_bf16_sampled(const uint16_t *x, const uint16_t *y, const int32_t *index, const int32_t *counts, float *out, int64_t rows,
                          int64_t columns, int64_t height, int64_t padded, int64_t by_tiles, int64_t tokens, int64_t begin, int64_t end) {
  float *sums = scratch((end - begin) * height * padded + (columns + 1 + rows + 1) * PANEL / 2);
  uint16_t *panel = (uint16_t *)(sums + (end - begin) * height * padded), *other = panel + (columns + 1) * PANEL;
  if (sums == NULL) return 1;
  begin_tiles(by_tiles);
  memset(sums, 0, (end - begin) * height * padded * sizeof *sums);
  for (int64_t t = 0; t < tokens; t += PANEL) {
    int64_t here = tokens - t < PANEL ? tokens - t : PANEL;
    turn_panel(x + t * columns, here, columns, panel);
    turn_panel(y + t * rows, here, rows, other);
    for (int64_t g = begin; g < end; g++)
      for (int64_t j = 0; j < counts[g]; j += TILE) {
        vec pair[LANES]; /* of tokens, 16 columns each */
        for (int c = 0; c < TILE; c++) pair[c] = (vec)_mm512_load_si512(panel + (int64_t)index[g * padded + j + c] * PANEL);
        turn(pair);
        float *sum = sums + (g - begin) * height * padded + j;
        const uint16_t *z = other + g * height * PANEL;
#if defined(HAS_TILES)
        if (by_tiles) {
          LOAD_TILE(6, pair, 2 * PANEL);
          for (int64_t r = 0; r < height; r += TILE) {
            LOAD_TILE(0, sum + r * padded, sizeof(float) * padded);
            LOAD_TILE(4, z + r * PANEL, 2 * PANEL);
            _tile_dpbf16ps(0, 4, 6);
            _tile_stored(0, sum + r * padded, sizeof(float) * padded);
          }
          continue;
        }
#endif
        for (int64_t first = 0; first < height; first += ROWS) {
          __m512 some[ROWS];
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) some[r] = _mm512_loadu_ps(sum + (first + r) * padded);
#pragma GCC unroll 16
          for (int p = 0; p < LANES; p++)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) some[r] = dot(some[r], pair_of(z + (first + r) * PANEL + 2 * p), (__m512i)pair[p]);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(sum + (first + r) * padded, some[r]);
        }
      }
  }
  end_tiles(by_tiles);
  for (int64_t g = begin; g < end; g++)
    for (int64_t r = 0; r < height; r++)
      for (int64_t j = 0; j < counts[g]; j++)
        out[(g * height + r) * columns + index[g * padded + j]] = sums[((g - begin) * height + r) * padded + j];
  return 0;
}

/* Pack groups `begin` to `end` of a float32 weight (rows, columns), rounded: into `values`, or with `turned` the tiles of the transpose. */
int nm_block_pack(const float *weight, int64_t rows, int64_t columns, int64_t height, int64_t padded, int64_t turned, int64_t begin,
                  int64_t end, uint16_t *values, int32_t *index, int32_t *counts) {
  uint32_t *any = (uint32_t *)scratch(columns);
  if (any == NULL) return 1;
  int64_t deep = tiles_of(height, DEEP);
  for (int64_t g = begin; g < end; g++) {
    int64_t last = (g + 1) * height < rows ? (g + 1) * height : rows, count = 0;
    int32_t *at = index + g * padded;
    memset(any, 0, columns * sizeof *any);
    for (int64_t r = g * height; r < last; r++)
      for (int64_t k = 0; k < columns; k++) any[k] |= weight[r * columns + k] != 0;
    for (int64_t k = 0; k < columns; k++)
      if (any[k]) at[count++] = (int32_t)k;
    counts[g] = (int32_t)count;
    int64_t whole = tiles_of(count, DEEP) * DEEP;
    for (int64_t j = count; j < whole; j++) at[j] = (int32_t)columns;
    for (int64_t i = 0; i < (turned ? deep * DEEP : height); i++) {
      int64_t r = g * height + i;
      for (int64_t j = 0; j < whole; j += TILE) {
        int64_t left = i < height && r < last ? count - j : 0;
        __mmask16 keep = left >= TILE ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
        __m512 w = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), keep, _mm512_loadu_si512(at + j), weight + (keep ? r : 0) * columns, 4);
        if (!turned) {
          uint16_t *to = values + (g * height + i / TILE * TILE) * padded + j / DEEP * TILE * DEEP;
          _mm256_storeu_si256((__m256i *)(to + i % TILE * DEEP + j % DEEP), low(w));
        } else {
          uint16_t some[TILE], *to = values + (g * (padded / TILE) + j / TILE) * deep * TILE * DEEP + i / DEEP * TILE * DEEP + i % DEEP;
          _mm256_storeu_si256((__m256i *)some, low(w));
          for (int l = 0; l < TILE; l++) to[l * DEEP] = some[l];
        }
      }
    }
  }
  return 0;
}
#endif
