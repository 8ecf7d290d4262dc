/* Products with an N:M matrix of int8, on one thread: outputs lie in the lanes. Needs AVX-512 with VNNI and VBMI; without them this file
   is empty.

   A tile is TILE rows, cut into segments of SEGMENT columns. A slot holds four non-zeros of each of its rows, SEGMENT bytes, and as many
   bytes with their columns, counted from the segment's first. A segment has as many slots as its fullest row has fours of non-zeros;
   places that are left hold zeros. Slots lie one after another by tile, then by segment: those of tile i are start[i] up to
   start[i + 1], and counts[i * segments + s] has the number in each segment.

   A token is quantised to unsigned bytes: x is about scale * (byte - zero). Then, for each slot, one permutation picks the bytes that it
   names out of the token's segment, and one instruction multiplies them and adds four at a time to TILE sums of 32 bits, which are exact:
   their order does not matter. The zero comes off as a multiple of the rows' sums. */
#include <stdint.h>

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include <float.h>
#include <immintrin.h>

#define TILE 16
#define SEGMENT 64
#define MOST 16     /* tokens at once */
#define WIDE 2048   /* columns: of more, half as many tokens stay in the first-level cache */

typedef struct {
  float scale[MOST];
  int32_t zero[MOST];
} Scales;

static inline __m512 some(const float *from, int64_t count) { /* the first `count` of 16, zeros behind */
  if (count >= 16) return _mm512_loadu_ps(from);
  return _mm512_maskz_loadu_ps(count <= 0 ? 0 : (__mmask16)((1u << count) - 1), from);
}

/* Token t of `tokens`: byte c of its segment s at to[(s * tokens + t) * SEGMENT + c]. Returns 1 for NaN and infinity. */
static int quantise(const float *x, int64_t columns, int64_t segments, int t, int tokens, uint8_t *to, Scales *by) {
  __m512 none = _mm512_setzero_ps(), low[2] = {none, none}, high[2] = {none, none}, odd[2] = {none, none};
  for (int64_t c = 0; c < columns; c += 32)
    for (int i = 0; i < 2; i++) {
      __m512 v = some(x + c + 16 * i, columns - c - 16 * i);
      low[i] = _mm512_min_ps(low[i], v), high[i] = _mm512_max_ps(high[i], v);
      odd[i] = _mm512_fmadd_ps(v, none, odd[i]); /* zero, or NaN */
    }
  float least = _mm512_reduce_min_ps(_mm512_min_ps(low[0], low[1])), most = _mm512_reduce_max_ps(_mm512_max_ps(high[0], high[1]));
  if (_mm512_cmp_ps_mask(_mm512_add_ps(odd[0], odd[1]), none, _CMP_UNORD_Q)) return 1;
  float scale = most / 255.0f - least / 255.0f;
  if (scale < FLT_MIN) scale = FLT_MIN; /* its inverse is finite */
  float inverse = 1.0f / scale;
  int zero = _mm_cvtss_si32(_mm_set_ss(-least * inverse)); /* to the nearest, ties to even, as below */
  zero = zero > 255 ? 255 : zero;
  by->scale[t] = scale, by->zero[t] = zero;
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); /* of what packing shuffles */
  for (int64_t s = 0; s < segments; s++) {
    __m512i q[4];
    for (int i = 0; i < 4; i++) {
      int64_t c = s * SEGMENT + 16 * i;
      __m512 v = _mm512_mul_ps(some(x + c, columns - c), _mm512_set1_ps(inverse));
      q[i] = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(zero));
    }
    __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3])); /* within 0 and 255 */
    _mm512_store_si512(to + (s * tokens + t) * SEGMENT, _mm512_permutexvar_epi32(order, bytes));
  }
  return 0;
}

typedef struct {
  const int8_t *values;
  const uint8_t *index, *counts;
  int64_t segments;
} Tile;

/* y (tokens, 16 of `rows`) of one tile; `keep` has the rows that there are. */
static inline __attribute__((always_inline)) void multiply(const uint8_t *x, Tile tile, const Scales *by, __m512i sum, __m512 scale, __m512 bias,
                                                           __mmask16 keep, float *y, int64_t rows, int tokens) {
  __m512i a[MOST], b[MOST];
#pragma GCC unroll 16
  for (int t = 0; t < tokens; t++) a[t] = b[t] = _mm512_setzero_si512();
  for (int64_t s = 0; s < tile.segments; s++, x += tokens * SEGMENT)
    for (int i = tile.counts[s]; i; i--, tile.values += SEGMENT, tile.index += SEGMENT) {
      __m512i v = _mm512_loadu_si512(tile.values), at = _mm512_loadu_si512(tile.index);
#pragma GCC unroll 16
      for (int t = 0; t < tokens; t++) {
        __m512i next = _mm512_dpbusd_epi32(a[t], _mm512_permutexvar_epi8(at, _mm512_load_si512(x + t * SEGMENT)), v);
        if (tokens > 4) a[t] = next;
        else a[t] = b[t], b[t] = next; /* in turn: none waits for the one before */
      }
    }
#pragma GCC unroll 16
  for (int t = 0; t < tokens; t++) {
    __m512i all = tokens > 4 ? a[t] : _mm512_add_epi32(a[t], b[t]);
    all = _mm512_sub_epi32(all, _mm512_mullo_epi32(sum, _mm512_set1_epi32(by->zero[t])));
    __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(all), _mm512_set1_ps(by->scale[t])), scale);
    _mm512_mask_storeu_ps(y + t * rows, keep, _mm512_add_ps(v, bias));
  }
}

/* y = x S^T + bias for tokens `first` to `last` and tiles `begin` to `end` of S (rows, columns): x is (tokens, columns), y (tokens, rows),
   float32 as the bias, or NULL; `scales` and `sums` are those of the rows, the latter filled up to whole tiles. Where a token is not finite,
   *odd becomes 1 and y is of no use. Returns 0, or 1 without memory. */
int nm_int8(const float *x, float *y, const float *bias, const int8_t *values, const uint8_t *index, const uint8_t *counts,
            const int32_t *start, const float *scales, const int32_t *sums, int32_t *odd, int64_t rows, int64_t columns, int64_t first,
            int64_t last, int64_t begin, int64_t end) {
  int64_t segments = (columns + SEGMENT - 1) / SEGMENT;
  uint8_t *bytes = (uint8_t *)scratch(MOST * segments * SEGMENT / sizeof(float));
  int most = columns > WIDE ? MOST / 2 : MOST;
  if (bytes == NULL) return 1;
  for (int64_t t = first; t < last;) {
    int tokens = most;
    while (tokens > last - t) tokens /= 2;
    Scales by;
    for (int i = 0; i < tokens; i++)
      if (quantise(x + (t + i) * columns, columns, segments, i, tokens, bytes, &by)) {
        *odd = 1;
        return 0;
      }
    for (int64_t i = begin; i < end; i++) {
      int64_t r = i * TILE, outputs = rows - r;
      Tile tile = {values + (int64_t)start[i] * SEGMENT, index + (int64_t)start[i] * SEGMENT, counts + i * segments, segments};
      __mmask16 keep = outputs >= TILE ? 0xffff : (__mmask16)((1u << outputs) - 1);
      __m512 scale = some(scales + r, outputs), add = bias == NULL ? _mm512_setzero_ps() : some(bias + r, outputs);
      __m512i sum = _mm512_loadu_si512(sums + r);
      float *to = y + t * rows + r;
#define MULTIPLY(TOKENS) multiply(bytes, tile, &by, sum, scale, add, keep, to, rows, TOKENS)
      if (tokens == 16) MULTIPLY(16);
      else if (tokens == 8) MULTIPLY(8);
      else if (tokens == 4) MULTIPLY(4);
      else if (tokens == 2) MULTIPLY(2);
      else MULTIPLY(1);
    }
    t += tokens;
  }
  return 0;
}
#endif
