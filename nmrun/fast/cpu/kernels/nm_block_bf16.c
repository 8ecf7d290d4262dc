/* Products of bfloat16 with a V:N:M matrix, on one thread. Follows nm_scratch.c, nm_vectors.c and nm_tiles.c in one translation unit. Needs
   AVX-512 with BF16; without it this file is empty, unless EMULATED has the instruction written out, for tests on other processors.

   A group of V rows shares its columns, so it is a small dense matrix: `kept` columns, filled up with zeros to whole tiles of TILE rows and
   DEEP columns, which lie one after another, by group, then by row, then by column. PANEL tokens are turned once, to rows of one column and
   PANEL tokens. For a group its columns are gathered from these by two loads, two interleavings and two stores for two columns: that is
   what the instructions read, a pair of columns of 16 tokens in a register. Interleaving leaves the tokens in the order of `token_of`.
   Behind the last column there is one of zeros, for what fills up.

   With `by_tiles` the products are those of AMX, four at once, and the next group is gathered between them; else vdpbf16ps multiplies a
   pair of a row with 16 tokens. Either adds up a token's products in its own order: its bits depend on nothing but the operands. */
#if LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VL__) && (defined(__AVX512BF16__) || defined(EMULATED))
#include <immintrin.h>

#define TILE 16
#define DEEP 32
#define PANEL 32
#define ROWS 8 /* at once: their sums for a panel are 16 registers */

static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i a, __m512i b) {
#if defined(EMULATED) /* two fused operations, that of the higher numbers first */
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  sum = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, high), (__m512)_mm512_and_si512(b, high), sum);
  return _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sum);
#else
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
}

/* To bfloat16, ties to even; a NaN stays one. */
static inline __m256i low(__m512 v) {
#if defined(EMULATED)
  return (__m256i)narrowed((vec)v);
#else
  return (__m256i)_mm512_cvtneps_pbh(v);
#endif
}

static inline int token_of(int half, int lane) { return lane / 4 * 8 + half * 4 + lane % 4; }

/* panel[column][token], from x (tokens, columns); missing tokens are zero, and so is column number `columns`. */
static void turn_panel(const uint16_t *x, int64_t tokens, int64_t columns, uint16_t *panel) {
  __m512i even, odd; /* columns of pairs of 16 and 16 tokens */
  uint16_t pick[2][PANEL];
  for (int i = 0; i < PANEL; i++) pick[0][i] = (uint16_t)(2 * i), pick[1][i] = (uint16_t)(2 * i + 1);
  even = _mm512_loadu_si512(pick[0]), odd = _mm512_loadu_si512(pick[1]);
  for (int64_t k = 0; k < columns; k += DEEP) {
    int64_t left = columns - k;
    __mmask32 keep = left >= DEEP ? 0xffffffff : (1u << left) - 1;
    vec a[2][LANES];
    for (int half = 0; half < 2; half++) {
      for (int t = 0; t < LANES; t++)
        a[half][t] = half * LANES + t < tokens ? (vec)_mm512_maskz_loadu_epi16(keep, x + (half * LANES + t) * columns + k) : (vec){0};
      turn(a[half]);
    }
    for (int64_t i = 0; i < LANES && 2 * i < left; i++) {
      __m512i first = (__m512i)a[0][i], second = (__m512i)a[1][i];
      _mm512_store_si512(panel + (k + 2 * i) * PANEL, _mm512_permutex2var_epi16(first, even, second));
      if (2 * i + 1 < left) _mm512_store_si512(panel + (k + 2 * i + 1) * PANEL, _mm512_permutex2var_epi16(first, odd, second));
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
        int32_t pair;
        memcpy(&pair, w + r * DEEP, sizeof pair);
        __m512i both = _mm512_set1_epi32(pair);
        sum[r][0] = dot(sum[r][0], both, a), sum[r][1] = dot(sum[r][1], both, b);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++) _mm512_store_ps(sums + (first + r) * PANEL + half * LANES, sum[r][half]);
  }
}

/* One tile of rows for a panel of tokens: turned, with the bias, rounded. */
static void put_tile(const float *sums, const float *bias, int64_t row, int64_t rows, int64_t tokens, uint16_t *y) {
  int64_t left = rows - row;
  __mmask16 keep = left >= TILE ? 0xffff : (__mmask16)((1u << left) - 1);
  __m512 add = bias == NULL ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(keep, bias + row);
  for (int half = 0; half < 2; half++) {
    vec a[LANES];
    for (int r = 0; r < TILE; r++) a[r] = (vec)_mm512_load_ps(sums + r * PANEL + half * LANES);
    turn(a);
    for (int l = 0; l < LANES; l++) {
      int64_t t = token_of(half, l);
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

/* The same of one tile of rows, or with `two` of two, `deep` tiles of columns each; meanwhile `some` pairs of the next group are gathered
   a tile. */
static void multiply_by_tiles(const uint16_t *values, const uint16_t *pairs, int64_t deep, int two, float *sums, Gathering *next,
                              int64_t some) {
  const int size = TILE * DEEP, line = 4 * PANEL; /* elements, bytes */
  _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
  for (int64_t k = 0; k < deep; k++) {
    _tile_loadd(4, values + k * size, 2 * DEEP);
    _tile_loadd(6, pairs + k * DEEP * PANEL, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pairs + k * DEEP * PANEL + PANEL, line);
    _tile_dpbf16ps(1, 4, 7);
    gather_some(next, some);
    if (two) {
      _tile_loadd(5, values + (deep + k) * size, 2 * DEEP);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, line), _tile_stored(1, sums + LANES, line);
  if (two) _tile_stored(2, sums + TILE * PANEL, line), _tile_stored(3, sums + TILE * PANEL + LANES, line);
}

static void panel_by_tiles(const uint16_t *panel, uint16_t *pairs, const float *bias, const uint16_t *values, const int32_t *index,
                           int64_t rows, int64_t height, int64_t padded, int64_t tokens, int64_t begin, int64_t end, uint16_t *y) {
  _Alignas(64) float sums[2 * TILE * PANEL];
  int64_t deep = padded / DEEP, tiles = height / TILE, steps = (tiles + 1) / 2 * deep, some = (padded / 2 + steps - 1) / steps;
  uint16_t *now = pairs, *other = pairs + padded * PANEL;
  gather(panel, index + begin * padded, 0, padded / 2, now);
  for (int64_t g = begin; g < end; g++) {
    Gathering next = {panel, index + (g + 1) * padded, other, 0, g + 1 < end ? padded / 2 : 0};
    for (int64_t i = 0; i < tiles; i += 2) {
      int two = i + 1 < tiles;
      multiply_by_tiles(values + (g * height + i * TILE) * padded, now, deep, two, sums, &next, some);
      for (int64_t j = 0; j <= two; j++) {
        int64_t row = g * height + (i + j) * TILE;
        if (row < rows) put_tile(sums + j * TILE * PANEL, bias, row, rows, tokens, y);
      }
    }
    uint16_t *before = now;
    now = other, other = before;
  }
}
#endif

/* y = x S^T + bias for tokens `first` to `last` and groups `begin` to `end` of S (rows, columns), `height` rows each, a multiple of TILE: x
   is (tokens, columns), y (tokens, rows), bfloat16, and the bias float32 or NULL. index is (groups, padded), the columns of each group;
   padded is a multiple of DEEP, behind `kept` all are `columns`. Returns 0, or 1 without memory. */
int nm_block_bf16(const uint16_t *x, uint16_t *y, const float *bias, const uint16_t *values, const int32_t *index, int64_t rows,
                  int64_t columns, int64_t height, int64_t kept, int64_t padded, int64_t by_tiles, int64_t first, int64_t last,
                  int64_t begin, int64_t end) {
  uint16_t *panel = (uint16_t *)scratch((columns + 1 + 2 * padded) * PANEL / 2), *pairs = panel + (columns + 1) * PANEL;
  if (panel == NULL) return 1;
#if defined(HAS_TILES)
  if (by_tiles) configure_tiles();
#else
  (void)by_tiles;
#endif
  for (int64_t t = first; t < last; t += PANEL) {
    int64_t tokens = last - t < PANEL ? last - t : PANEL;
    turn_panel(x + t * columns, tokens, columns, panel);
#if defined(HAS_TILES)
    if (by_tiles) {
      panel_by_tiles(panel, pairs, bias, values, index, rows, height, padded, tokens, begin, end, y + t * rows);
      continue;
    }
#endif
    for (int64_t g = begin; g < end; g++) {
      _Alignas(64) float sums[TILE * PANEL];
      gather(panel, index + g * padded, 0, (kept + 1) / 2, pairs);
      for (int64_t row = g * height; row < (g + 1) * height && row < rows; row += TILE) {
        multiply_by_vectors(values + row * padded, pairs, (kept + 1) / 2, sums);
        put_tile(sums, bias, row, rows, tokens, y + t * rows);
      }
    }
  }
#if defined(HAS_TILES)
  if (by_tiles) _tile_release();
#endif
  return 0;
}
#endif
