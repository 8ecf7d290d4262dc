/* Products of bfloat16 with an N:M matrix, on one thread: outputs lie in the lanes. Follows nm_vectors.c in one translation unit. Needs
   AVX-512 with BF16; without it this file is empty, unless EMULATED has the instruction written out, for tests on other processors.

   A tile is TILE rows, cut into blocks of BLOCK columns and those into segments of SEGMENT columns. A slot holds two non-zeros of each of
   its rows, SEGMENT numbers, and as many bytes with their columns, counted from the segment's first. A segment has as many slots as its
   fullest row has twos of non-zeros; places that are left hold zeros. Slots lie one after another, by block, then tile, then segment: those
   of tile i in block b are start[b * tiles + i] up to start[b * tiles + i + 1], and counts[] has the number in each of the SEGMENTS segments.

   For each slot, one permutation picks the numbers that it names out of the token's segment, and one instruction multiplies them and adds
   two at a time to TILE sums of float32. A block's sum begins at zero, and the blocks' sums are added in their order: so a token has the same
   bits in whatever company it comes, though a few tokens take two blocks side by side, so that no sum waits for the one before. */
#if defined(__AVX512BW__) && defined(__AVX512VL__) && (defined(__AVX512BF16__) || defined(EMULATED))
#include <immintrin.h>

#define TILE 16
#define SEGMENT 32
#define SEGMENTS 16
#define BLOCK (SEGMENT * SEGMENTS) /* 16 KB of MOST tokens */
#define MOST 16                    /* tokens at once */
#define AT_ONCE 64                 /* tiles: the sums of MOST tokens, 64 KB, stay in the second-level cache */
#define PAIRS 128                  /* of tokens that are summed up before a weight's gradient is written */

/* Numbers round to the nearest, ties to even, and subnormal ones are zero: vdpbf16ps does so whatever is set, all else because it is set. */
#define ROUNDING 0x9fc0

static inline __m512i places(const uint8_t *index) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)index)); }

static inline uint32_t first_of(int64_t count, int of) { /* a mask of the first `count` of so many */
  return count >= of ? (uint32_t)((1ull << of) - 1) : count <= 0 ? 0 : (1u << count) - 1;
}

typedef struct {
  const uint16_t *values;
  const uint8_t *index, *counts;
} Slots;

typedef struct {
  const uint16_t *values;
  const uint8_t *index, *counts;
  const int32_t *start;
  int64_t tiles, blocks;
} Matrix;

static Slots slots_of(const Matrix *m, int64_t block, int64_t tile) {
  int64_t i = block * m->tiles + tile;
  return (Slots){m->values + (int64_t)m->start[i] * SEGMENT, m->index + (int64_t)m->start[i] * SEGMENT, m->counts + i * SEGMENTS};
}

/* --- y = x S^T + bias ------------------------------------------------------------------------------------------------------------------- */

/* Tokens side by side: segment s of token t at to[(s * tokens + t) * SEGMENT], zeros behind the last column. */
static void load(const uint16_t *x, int64_t columns, int tokens, uint16_t *to) {
  for (int64_t c = 0; c < columns; c += SEGMENT)
    for (int t = 0; t < tokens; t++, to += SEGMENT)
      _mm512_store_si512(to, _mm512_maskz_loadu_epi16(first_of(columns - c, SEGMENT), x + t * columns + c));
}

/* Add `blocks` blocks of one tile, from x on, to the sums (tokens, TILE). */
static inline __attribute__((always_inline)) void add(const uint16_t *x, Slots *of, int blocks, int tokens, float *sums) {
  __m512 a[2][MOST];
#pragma GCC unroll 16
  for (int t = 0; t < tokens; t++) a[0][t] = a[1][t] = _mm512_setzero_ps();
  for (int s = 0; s < SEGMENTS; s++, x += tokens * SEGMENT)
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) {
      const uint16_t *from = x + b * tokens * BLOCK;
      for (int i = of[b].counts[s]; i; i--, of[b].values += SEGMENT, of[b].index += SEGMENT) {
        __m512i v = _mm512_loadu_si512(of[b].values), at = places(of[b].index);
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t++) a[b][t] = dot(a[b][t], _mm512_permutexvar_epi16(at, _mm512_load_si512(from + t * SEGMENT)), v);
      }
    }
#pragma GCC unroll 16
  for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) _mm512_store_ps(sums + t * TILE, _mm512_add_ps(_mm512_load_ps(sums + t * TILE), a[b][t]));
}

static __attribute__((noinline)) int multiply(const uint16_t *x, uint16_t *y, const float *bias, const Matrix *m, int64_t rows, int64_t columns,
                                              int64_t first, int64_t last, int64_t begin, int64_t end) {
  float *sums = scratch(MOST * (AT_ONCE * TILE + m->blocks * BLOCK / 2));
  if (sums == NULL) return 1;
  uint16_t *panel = (uint16_t *)(sums + MOST * AT_ONCE * TILE);
  for (int64_t t = first; t < last;) {
    int tokens = MOST;
    while (tokens > last - t) tokens /= 2;
    load(x + t * columns, columns, tokens, panel);
    for (int64_t i0 = begin; i0 < end; i0 += AT_ONCE) {
      int64_t i1 = end - i0 < AT_ONCE ? end : i0 + AT_ONCE;
      float *to = sums;
      for (int64_t i = i0; i < i1; i++) {
        __m512 initial = bias == NULL ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(first_of(rows - i * TILE, TILE), bias + i * TILE);
        for (int k = 0; k < tokens; k++, to += TILE) _mm512_store_ps(to, initial);
      }
      for (int64_t b = 0; b < m->blocks;) {
        int some = tokens <= 4 && b + 1 < m->blocks ? 2 : 1;
        const uint16_t *from = panel + b * tokens * BLOCK;
        to = sums;
        for (int64_t i = i0; i < i1; i++, to += tokens * TILE) {
          Slots of[2] = {slots_of(m, b, i), slots_of(m, b + some - 1, i)};
          if (tokens == 16) add(from, of, 1, 16, to);
          else if (tokens == 8) add(from, of, 1, 8, to);
          else if (tokens == 4 && some == 2) add(from, of, 2, 4, to);
          else if (tokens == 4) add(from, of, 1, 4, to);
          else if (tokens == 2 && some == 2) add(from, of, 2, 2, to);
          else if (tokens == 2) add(from, of, 1, 2, to);
          else if (some == 2) add(from, of, 2, 1, to);
          else add(from, of, 1, 1, to);
        }
        b += some;
      }
      to = sums;
      for (int64_t i = i0; i < i1; i++)
        for (int k = 0; k < tokens; k++, to += TILE)
          _mm256_mask_storeu_epi16(y + (t + k) * rows + i * TILE, first_of(rows - i * TILE, TILE), (__m256i)narrowed(*(const vec *)to));
    }
    t += tokens;
  }
  return 0;
}

static Matrix matrix_of(const uint16_t *values, const uint8_t *index, const uint8_t *counts, const int32_t *start, int64_t rows, int64_t columns) {
  return (Matrix){values, index, counts, start, (rows + TILE - 1) / TILE, (columns + BLOCK - 1) / BLOCK};
}

/* For tokens `first` to `last` and tiles `begin` to `end` of S (rows, columns): x is (tokens, columns), y (tokens, rows), bfloat16; the bias
   is float32, or NULL. Returns 0, or 1 without memory. */
int nm_bf16(const uint16_t *x, uint16_t *y, const float *bias, const uint16_t *values, const uint8_t *index, const uint8_t *counts,
            const int32_t *start, int64_t rows, int64_t columns, int64_t first, int64_t last, int64_t begin, int64_t end) {
  Matrix m = matrix_of(values, index, counts, start, rows, columns);
  unsigned before = _mm_getcsr();
  _mm_setcsr(ROUNDING);
  int failed = multiply(x, y, bias, &m, rows, columns, first, last, begin, end);
  _mm_setcsr(before);
  return failed;
}

/* --- packing ---------------------------------------------------------------------------------------------------------------------------- */

/* A float32 matrix (rows, columns), or with `turned` the transpose of one that lies there as (columns, rows); what lies there has its rows
   `wide` numbers apart. */
typedef struct {
  const float *numbers;
  int turned;
  int64_t wide, rows, columns;
} Source;

/* LANES numbers: of row r from column c on; turned, of column c from row r on. Zeros where there are none. */
static inline __m512i some(const Source *m, int64_t r, int64_t c) {
  int64_t high = m->turned ? c : r, across = m->turned ? r : c, end = m->turned ? m->rows : m->columns;
  uint32_t keep = high < (m->turned ? m->columns : m->rows) ? first_of(end - across, LANES) : 0;
  return _mm512_maskz_loadu_epi32((__mmask16)keep, m->numbers + high * m->wide + across);
}

/* Which of them are not rounded to zero. */
static inline __mmask16 filled(__m512i v) {
  return _mm512_cmpgt_epu32_mask(_mm512_and_si512(v, _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(0x8000));
}

/* counts of tiles `begin` to `end`, and in nonzeros[i] the non-zeros of tile i. */
int nm_bf16_count(const float *matrix, int turned, int64_t wide, int64_t rows, int64_t columns, int64_t begin, int64_t end, uint8_t *counts,
                  int32_t *nonzeros) {
  Source m = {matrix, turned, wide, rows, columns};
  int64_t blocks = (columns + BLOCK - 1) / BLOCK, tiles = (rows + TILE - 1) / TILE;
  for (int64_t i = begin; i < end; i++) {
    nonzeros[i] = 0;
    for (int64_t s = 0; s < blocks * SEGMENTS; s++) {
      int64_t r = i * TILE, c = s * SEGMENT;
      int32_t each[TILE];
      __m512i sums = _mm512_setzero_si512();
      if (turned)
        for (int k = 0; k < SEGMENT; k++) sums = _mm512_mask_add_epi32(sums, filled(some(&m, r, c + k)), sums, _mm512_set1_epi32(1));
      else {
        for (int l = 0; l < TILE; l++)
          each[l] = __builtin_popcount(filled(some(&m, r + l, c)) | (uint32_t)filled(some(&m, r + l, c + LANES)) << LANES);
        sums = _mm512_loadu_si512(each);
      }
      nonzeros[i] += _mm512_reduce_add_epi32(sums);
      counts[(s / SEGMENTS * tiles + i) * SEGMENTS + s % SEGMENTS] = (uint8_t)((_mm512_reduce_max_epi32(sums) + 1) / 2);
    }
  }
  return 0;
}

/* Rows r to r + TILE of columns c to c + SEGMENT, rounded: the words of each row that are not zero, bfloat16 above and the column below;
   even ones and odd ones of them apart, zeros behind. */
static inline void gather(const Source *m, int64_t r, int64_t c, vec even[TILE], vec odd[TILE]) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), one = _mm512_set1_epi32(1);
  const __m512i twice = _mm512_add_epi32(lanes, lanes);
  vec half_of[2][TILE];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
#pragma GCC unroll 16
    for (int l = 0; l < TILE; l++)
      half_of[h][l] = (vec)(m->turned ? some(m, r, c + h * LANES + l) : some(m, r + l, c + h * LANES));
    if (m->turned) turn(half_of[h]);
  }
  for (int l = 0; l < TILE; l++) {
    __m512i words[2];
    __mmask16 is_filled[2];
    for (int h = 0; h < 2; h++) {
      __m512i number = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrowed(half_of[h][l])), 16);
      is_filled[h] = filled((__m512i)half_of[h][l]);
      words[h] = _mm512_maskz_compress_epi32(is_filled[h], _mm512_or_si512(number, _mm512_add_epi32(lanes, _mm512_set1_epi32(h * LANES))));
    }
    int first = __builtin_popcount(is_filled[0]); /* the second half's words follow the first's */
    __m512i moved = _mm512_sub_epi32(lanes, _mm512_set1_epi32(first));
    __m512i low = _mm512_mask_permutexvar_epi32(words[0], (__mmask16)(0xffff << first), moved, words[1]);
    __m512i high = _mm512_maskz_permutexvar_epi32((__mmask16)first_of(first, LANES), moved, words[1]);
    even[l] = (vec)_mm512_permutex2var_epi32(low, twice, high);
    odd[l] = (vec)_mm512_permutex2var_epi32(low, _mm512_add_epi32(twice, one), high);
  }
  turn(even), turn(odd);
}

/* Values and index of tiles `begin` to `end`, whose counts and start are there. */
int nm_bf16_fill(const float *matrix, int turned, int64_t wide, int64_t rows, int64_t columns, int64_t begin, int64_t end, const uint8_t *counts,
                 const int32_t *start, uint16_t *values, uint8_t *index) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  Source m = {matrix, turned, wide, rows, columns};
  int64_t blocks = (columns + BLOCK - 1) / BLOCK, tiles = (rows + TILE - 1) / TILE;
  for (int64_t i = begin; i < end; i++)
    for (int64_t b = 0; b < blocks; b++) {
      int64_t slot = start[b * tiles + i];
      for (int64_t s = 0; s < SEGMENTS; s++) {
        int count = counts[(b * tiles + i) * SEGMENTS + s];
        if (count == 0) continue;
        vec even[TILE], odd[TILE];
        gather(&m, i * TILE, b * BLOCK + s * SEGMENT, even, odd);
        for (int k = 0; k < count; k++, slot++) { /* slot k: of each row the words 2k and 2k + 1 */
          __m512i one = (__m512i)even[k], two = (__m512i)odd[k];
          _mm512_storeu_si512(values + slot * SEGMENT, _mm512_or_si512(_mm512_and_si512(two, upper), _mm512_srli_epi32(one, 16)));
          __m512i places_of = _mm512_or_si512(_mm512_slli_epi32(two, 16), _mm512_andnot_si512(upper, one));
          _mm256_storeu_si256((__m256i *)(index + slot * SEGMENT), _mm512_cvtepi16_epi8(places_of));
        }
      }
    }
  return 0;
}

/* --- y^T x where S has non-zeros -------------------------------------------------------------------------------------------------------- */

/* Two tokens' numbers side by side: those of column c at to[2 * c]. `second`: whether there are two. */
static inline void interleave(const uint16_t *x, int64_t apart, int second, int64_t count, uint16_t *to, int width) {
  for (int h = 0; h < width; h += LANES) {
    uint32_t keep = first_of(count - h, LANES);
    __m512i one = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)keep, x + h));
    __m512i two = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)(second ? keep : 0), x + apart + h));
    _mm512_store_si512(to + 2 * h, _mm512_or_si512(one, _mm512_slli_epi32(two, 16)));
  }
}

/* Add to the sums of `slots` slots of one segment what `pairs` pairs of tokens give. */
static inline __attribute__((always_inline)) void add_gradients(const uint16_t *x, const uint16_t *y, int pairs, const uint8_t *index, float *sums,
                                                                int slots) {
  __m512 a[8];
  __m512i at[8];
#pragma GCC unroll 4
  for (int k = 0; k < slots; k++) {
    __m512i both = places(index + k * SEGMENT);
    at[2 * k] = _mm512_and_si512(both, _mm512_set1_epi32(0xffff)), at[2 * k + 1] = _mm512_srli_epi32(both, 16);
    a[2 * k] = _mm512_setzero_ps(), a[2 * k + 1] = _mm512_setzero_ps();
  }
  for (int p = 0; p < pairs; p++, x += 2 * SEGMENT, y += 2 * TILE) {
    __m512i low = _mm512_load_si512(x), high = _mm512_load_si512(x + SEGMENT), of = _mm512_load_si512(y);
#pragma GCC unroll 8
    for (int e = 0; e < 2 * slots; e++) a[e] = dot(a[e], _mm512_permutex2var_epi32(low, at[e], high), of);
  }
#pragma GCC unroll 8
  for (int e = 0; e < 2 * slots; e++) _mm512_storeu_ps(sums + e * TILE, _mm512_add_ps(_mm512_loadu_ps(sums + e * TILE), a[e]));
}

static __attribute__((noinline)) int sample(const uint16_t *x, const uint16_t *y, const Matrix *m, int64_t rows, int64_t columns, int64_t tokens,
                                            int64_t begin, int64_t end, float *sums) {
  int64_t segments = (columns + SEGMENT - 1) / SEGMENT;
  uint16_t *panel = (uint16_t *)scratch(PAIRS * (segments * SEGMENT + (end - begin) * TILE));
  if (panel == NULL) return 1;
  uint16_t *gradients = panel + 2 * PAIRS * segments * SEGMENT;
  for (int64_t t = 0; t < tokens; t += 2 * PAIRS) {
    int pairs = (int)(tokens - t < 2 * PAIRS ? (tokens - t + 1) / 2 : PAIRS);
    for (int p = 0; p < pairs; p++) {
      int64_t token = t + 2 * p;
      int second = token + 1 < tokens;
      for (int64_t s = 0; s < segments; s++)
        interleave(x + token * columns + s * SEGMENT, columns, second, columns - s * SEGMENT, panel + 2 * (s * PAIRS + p) * SEGMENT, SEGMENT);
      for (int64_t i = begin; i < end; i++)
        interleave(y + token * rows + i * TILE, rows, second, rows - i * TILE, gradients + 2 * ((i - begin) * PAIRS + p) * TILE, TILE);
    }
    for (int64_t b = 0; b < m->blocks; b++)
      for (int64_t i = begin; i < end; i++) {
        Slots of = slots_of(m, b, i);
        float *to = sums + (int64_t)m->start[b * m->tiles + i] * SEGMENT;
        const uint16_t *gradient = gradients + 2 * (i - begin) * PAIRS * TILE;
        for (int s = 0; s < SEGMENTS; s++) {
          const uint16_t *from = panel + 2 * (b * SEGMENTS + s) * PAIRS * SEGMENT;
          int left = of.counts[s];
#define GRADIENTS(SLOTS) \
  for (; left >= SLOTS; left -= SLOTS, of.index += SLOTS * SEGMENT, to += SLOTS * SEGMENT) add_gradients(from, gradient, pairs, of.index, to, SLOTS)
          GRADIENTS(4);
          GRADIENTS(2);
          GRADIENTS(1);
        }
      }
  }
  return 0;
}

/* to (rows, columns), which holds zeros, gets the sum over tokens of y[token, r] x[token, c] where S has a non-zero, for tiles `begin` to `end`;
   y is (tokens, rows), x (tokens, columns), bfloat16. `sums`: as long as the values, zeros. Returns 0, or 1 without memory. */
int nm_bf16_sampled(const uint16_t *x, const uint16_t *y, const uint16_t *values, const uint8_t *index, const uint8_t *counts,
                    const int32_t *start, int64_t rows, int64_t columns, int64_t tokens, int64_t begin, int64_t end, float *sums, float *to) {
  Matrix m = matrix_of(values, index, counts, start, rows, columns);
  unsigned before = _mm_getcsr();
  _mm_setcsr(ROUNDING);
  int failed = sample(x, y, &m, rows, columns, tokens, begin, end, sums);
  _mm_setcsr(before);
  for (int64_t i = begin; !failed && i < end; i++)
    for (int64_t b = 0; b < m.blocks; b++) {
      int64_t slot = start[b * m.tiles + i];
      for (int64_t s = 0; s < SEGMENTS; s++)
        for (int k = counts[(b * m.tiles + i) * SEGMENTS + s]; k; k--, slot++)
          for (int l = 0; l < SEGMENT; l++) /* in sums, all rows' first non-zeros come before their second ones */
            if (values[slot * SEGMENT + l] << 1 & 0xffff)
              to[(i * TILE + l / 2) * columns + b * BLOCK + s * SEGMENT + index[slot * SEGMENT + l]] = sums[slot * SEGMENT + l % 2 * TILE + l / 2];
    }
  return failed;
}
#endif
