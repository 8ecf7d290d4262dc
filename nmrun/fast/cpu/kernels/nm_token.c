/* Products of a few tokens with a sparse matrix, on one thread: outputs lie in the lanes. Follows nm_product.c in one translation unit.

   A tile is TILE rows, cut into blocks of BLOCK columns and those into segments of TILE columns. A slot holds one non-zero of each of its
   rows: TILE values and their columns, counted from the block's first, so that the lowest four bits count from the segment's first. A
   segment has as many slots as its fullest row has non-zeros; the others are filled up with zeros. Slots lie one after another, by block,
   then tile, then segment: those of tile i in block b are start[b * tiles + i] up to start[b * tiles + i + 1], and counts[] has
   the number in each of the SEGMENTS segments.

   A segment of a token is one register, from which each slot picks its lanes: nothing but the packed matrix is read from memory.
   A token's sum adds up in the order of nm_product.c: the same bits. */
#define SEGMENTS (BLOCK / TILE)

#if defined(__AVX2__)
#include <immintrin.h> /* the compiler widens bytes one by one */
#endif

typedef float wide __attribute__((vector_size(4 * TILE)));
typedef float loose __attribute__((vector_size(4 * TILE), aligned(4))); /* anywhere in memory */

/* The TILE values of a slot. */
static inline __attribute__((always_inline)) wide slot_values(const void *values, int64_t slot, int low) {
  wide v;
  if (!low) return *(const loose *)((const float *)values + slot * TILE);
#if defined(__AVX512F__)
  __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)values + slot * TILE));
  return (wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#endif
  for (int l = 0; l < TILE; l++) v[l] = value(values, slot * TILE + l, 1, 1);
  return v;
}

/* What they are multiplied with: lanes of a segment of x, by the lowest four bits. */
static inline __attribute__((always_inline)) wide picked(const float *x, const uint8_t *index, int64_t slot) {
#if defined(__AVX512F__)
  __m512i lanes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(index + slot * TILE)));
  return (wide)_mm512_permutexvar_ps(lanes, _mm512_load_ps(x));
#elif defined(__AVX2__)
  wide factors;
  for (int half = 0; half < 2; half++) { /* three bits pick one of eight lanes, the fourth the eight */
    __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(index + slot * TILE + 8 * half)));
    __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(x), lanes), high = _mm256_permutevar8x32_ps(_mm256_load_ps(x + 8), lanes);
    __m256 both = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28)));
    memcpy((float *)&factors + 8 * half, &both, sizeof both);
  }
  return factors;
#else
  wide factors;
  for (int l = 0; l < TILE; l++) factors[l] = x[index[slot * TILE + l] & (TILE - 1)];
  return factors;
#endif
}

/* How many slots all segments of a tile and block have, 0 if they differ. */
static inline int slots_alike(const uint8_t *counts) {
  for (int s = 1; s < SEGMENTS; s++)
    if (counts[s] != counts[0]) return 0;
  return counts[0];
}

/* Add one tile and block for `tokens` tokens, `apart` floats from one to the next in x, `rows` in sums; `same` slots in each segment, or
   as many as counts says with 0. */
static inline __attribute__((always_inline)) void add_tile(const float *restrict x, int64_t apart, const void *restrict values,
                                                           const uint8_t *restrict index, const uint8_t *restrict counts, int same,
                                                           float *restrict sums, int64_t rows, int tokens, int low) {
  wide even[8] = {0}, odd[8] = {0};
  int64_t slot = 0;
#pragma GCC unroll 8
  for (int s = 0; s < SEGMENTS; s++) {
    int count = same ? same : counts[s];
    for (int i = 0; i < count; i++, slot++) {
      wide v = slot_values(values, slot, low);
      for (int t = 0; t < tokens; t++) {
        wide next = even[t] + v * picked(x + t * apart + s * TILE, index, slot);
#if LANES == 16 /* the two sums of nm_product.c, in turn */
        even[t] = odd[t], odd[t] = next;
#else
        even[t] = next;
#endif
      }
    }
  }
  for (int t = 0; t < tokens; t++) *(wide *)(sums + t * rows) += even[t] + odd[t];
}

/* y = x S^T + bias for the rows of tiles `begin` to `end`; x is (tokens, columns), y (tokens, rows). Flags and result as in nm_product. */
int nm_token(const void *x, void *y, const float *bias, const void *values, const uint8_t *index, const int32_t *start,
             const uint8_t *counts, int64_t rows, int64_t columns, int64_t tokens, int64_t begin, int64_t end, int flags) {
  int64_t tiles = (rows + TILE - 1) / TILE, blocks = (columns + BLOCK - 1) / BLOCK, apart = blocks * BLOCK;
  int64_t width = (end - begin) * TILE, first = begin * TILE, last = end * TILE < rows ? end * TILE : rows;
  int low = flags & LOW_X;
  float *turned = scratch(tokens * (apart + width)), *sums = turned + tokens * apart;
  if (turned == NULL) return 1;
  for (int64_t t = 0; t < tokens; t++) {
    float *to = turned + t * apart;
    if (!low) memcpy(to, at(x, t, 0, columns, 0), columns * sizeof(float));
    else
      for (int64_t c = 0; c < columns; c++) to[c] = value(x, t * columns + c, 1, 1);
    for (int64_t c = columns; c < apart; c++) to[c] = 0.0f;
    for (int64_t r = first; r < first + width; r++) sums[t * width + r - first] = bias == NULL || r >= rows ? 0.0f : bias[r];
  }
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t slot = start[b * tiles + tile], most = tokens;
      const uint8_t *of = counts + (b * tiles + tile) * SEGMENTS, *places_of = index + slot * TILE;
      int same = slots_alike(of);
      const char *values_of = (const char *)values + slot * TILE * (flags & LOW_VALUES ? 2 : 4);
#define ADD(TOKENS_, SAME, LOW_V) \
  add_tile(turned + t * apart + b * BLOCK, apart, values_of, places_of, of, SAME, sums + t * width + (tile - begin) * TILE, width, TOKENS_, LOW_V);
#define KINDS(TOKENS_, LOW_V)            \
  for (; t + TOKENS_ <= most; t += TOKENS_) { \
    if (same == 1) ADD(TOKENS_, 1, LOW_V)     \
    else if (same == 2) ADD(TOKENS_, 2, LOW_V) \
    else if (same == 4) ADD(TOKENS_, 4, LOW_V) \
    else if (same == 8) ADD(TOKENS_, 8, LOW_V) \
    else ADD(TOKENS_, 0, LOW_V)               \
  }
      int64_t t = 0;
      if (flags & LOW_VALUES) { KINDS(4, 1) KINDS(1, 1) }
      else { KINDS(4, 0) KINDS(1, 0) }
    }
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t r = first; r < last; r += LANES) {
      int64_t count = last - r < LANES ? last - r : LANES;
      write((char *)at(y, t, r, rows, (flags & LOW_Y) != 0), *(const vec *)(sums + t * width + r - first), count, (flags & LOW_Y) != 0);
    }
  return 0;
}
