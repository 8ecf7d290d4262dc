/* Products of int8 with a V:N:M matrix, on one thread. Follows nm_vectors.c, nm_tiles.c and nm_int8.c in one translation unit, and needs what
   the latter needs.

   Groups, tiles and panels are those of nm_block_bf16.c, with DEEP columns of bytes in a tile, and four columns of 16 tokens in a register.
   Tokens are quantised as in nm_int8.c, and sums are exact: the bits are those of its products. */
#if LANES == 16 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#define DEEP 64
#define PANEL 32
#define ROWS 8

static inline int token_of(int half, int lane) { return half * 8 + lane / 8 * 4 + lane / 4 % 2 * 16 + lane % 4; }

/* panel[column][token] of up to PANEL tokens, and behind it a column of zeros; by: their scales and zeros in the order of token_of. Returns
   1 for NaN and infinity. */
static int quantise_panel(const float *x, int64_t tokens, int64_t columns, uint8_t *rows, uint8_t *panel, float *scale, int32_t *zero) {
  int64_t segments = (columns + SEGMENT - 1) / SEGMENT, width = segments * SEGMENT;
  float scales[PANEL] = {0};
  int32_t zeros[PANEL] = {0};
  for (int64_t t = 0; t < PANEL; t++) {
    Scales by;
    if (t >= tokens) memset(rows + t * width, 0, width);
    else if (quantise(x + t * columns, columns, segments, 0, 1, rows + t * width, &by)) return 1;
    else scales[t] = by.scale[0], zeros[t] = by.zero[0];
  }
  for (int half = 0; half < 2; half++)
    for (int l = 0; l < LANES; l++) scale[half * LANES + l] = scales[token_of(half, l)], zero[half * LANES + l] = zeros[token_of(half, l)];
  __m512i pick[4];
  for (int b = 0; b < 4; b++) {
    uint8_t place[64] = {0};
    for (int t = 0; t < PANEL; t++) place[t] = (uint8_t)(4 * t + b); /* of two registers of 16 tokens */
    pick[b] = _mm512_loadu_si512(place);
  }
  for (int64_t k = 0; k < columns; k += SEGMENT) {
    vec a[2][LANES];
    for (int half = 0; half < 2; half++) {
      for (int t = 0; t < LANES; t++) a[half][t] = (vec)_mm512_loadu_si512(rows + (half * LANES + t) * width + k);
      turn(a[half]);
    }
    for (int64_t i = 0; i < SEGMENT && k + i < columns; i++) {
      __m512i column = _mm512_permutex2var_epi8((__m512i)a[0][i / 4], pick[i % 4], (__m512i)a[1][i / 4]);
      _mm256_store_si256((__m256i *)(panel + (k + i) * PANEL), _mm512_castsi512_si256(column));
    }
  }
  memset(panel + columns * PANEL, 0, PANEL);
  return 0;
}

/* Fours `begin` to `end` of a group's columns: fours[four][half][16 tokens][4]. */
static inline void gather_fours(const uint8_t *panel, const int32_t *index, int64_t begin, int64_t end, uint8_t *fours) {
  for (int64_t q = begin; q < end; q++) {
    __m256i c[4];
    for (int b = 0; b < 4; b++) c[b] = _mm256_load_si256((const __m256i *)(panel + (int64_t)index[4 * q + b] * PANEL));
    __m256i low[2] = {_mm256_unpacklo_epi8(c[0], c[1]), _mm256_unpacklo_epi8(c[2], c[3])};
    __m256i high[2] = {_mm256_unpackhi_epi8(c[0], c[1]), _mm256_unpackhi_epi8(c[2], c[3])};
    __m256i *to = (__m256i *)(fours + q * 4 * PANEL);
    _mm256_store_si256(to, _mm256_unpacklo_epi16(low[0], low[1])), _mm256_store_si256(to + 1, _mm256_unpackhi_epi16(low[0], low[1]));
    _mm256_store_si256(to + 2, _mm256_unpacklo_epi16(high[0], high[1])), _mm256_store_si256(to + 3, _mm256_unpackhi_epi16(high[0], high[1]));
  }
}

/* sums[row][half][16 tokens] of a tile of rows. */
static void multiply_by_vectors(const int8_t *values, const uint8_t *fours, int64_t count, int32_t *sums) {
  for (int first = 0; first < TILE; first += ROWS) {
    __m512i sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int64_t q = 0; q < count; q++) {
      const int8_t *w = values + q / (DEEP / 4) * TILE * DEEP + first * DEEP + q % (DEEP / 4) * 4;
      __m512i a = _mm512_load_si512(fours + q * 4 * PANEL), b = _mm512_load_si512(fours + q * 4 * PANEL + 2 * PANEL);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        int32_t four;
        memcpy(&four, w + r * DEEP, sizeof four);
        __m512i all = _mm512_set1_epi32(four);
        sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a, all), sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b, all);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++) _mm512_store_si512(sums + (first + r) * PANEL + half * LANES, sum[r][half]);
  }
}

#if defined(HAS_TILES)
/* The same; `deep` tiles of columns. */
static void multiply_by_tiles(const int8_t *values, const uint8_t *fours, int64_t deep, int32_t *sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t k = 0; k < deep; k++) {
    LOAD_TILE(4, values + k * TILE * DEEP, DEEP);
    LOAD_TILE(6, fours + k * DEEP * PANEL, 4 * PANEL);
    _tile_dpbsud(0, 4, 6);
    LOAD_TILE(7, fours + k * DEEP * PANEL + 2 * PANEL, 4 * PANEL);
    _tile_dpbsud(1, 4, 7);
  }
  _tile_stored(0, sums, 4 * PANEL);
  _tile_stored(1, sums + LANES, 4 * PANEL);
}
#endif

/* y = x S^T + bias as in nm_block_bf16.c, for x, y and bias in float32 or NULL; scales and sums are those of the rows, filled up to whole
   groups. Where a token is not finite, *odd becomes 1 and y is of no use. Returns 0, or 1 without memory. */
int nm_block_int8(const float *x, float *y, const float *bias, const int8_t *values, const int32_t *index, const int32_t *counts,
                  const float *scales, const int32_t *of_rows, int32_t *odd, const int64_t *size, int64_t by_tiles, int64_t first,
                  int64_t last, int64_t begin, int64_t end) {
  int64_t rows = size[0], columns = size[1], height = size[2], padded = size[3];
  int64_t width = (columns + SEGMENT - 1) / SEGMENT * SEGMENT;
  uint8_t *panel = (uint8_t *)scratch((width + columns + 2 + padded) * PANEL / 4), *bytes = panel + (columns + 2) / 2 * 2 * PANEL;
  uint8_t *fours = bytes + width * PANEL;
  if (panel == NULL) return 1;
  begin_tiles(by_tiles);
  for (int64_t t = first; t < last; t += PANEL) {
    int64_t tokens = last - t < PANEL ? last - t : PANEL;
    _Alignas(64) float scale[PANEL];
    _Alignas(64) int32_t zero[PANEL], sums[TILE * PANEL];
    if (quantise_panel(x + t * columns, tokens, columns, bytes, panel, scale, zero)) {
      *odd = 1;
      break;
    }
    for (int64_t g = begin; g < end; g++) {
      int64_t deep = (counts[g] + DEEP - 1) / DEEP, count = by_tiles ? deep * DEEP / 4 : (counts[g] + 3) / 4;
      gather_fours(panel, index + g * padded, 0, count, fours);
      for (int64_t row = g * height; row < (g + 1) * height && row < rows; row += TILE) {
        int64_t left = rows - row;
        __mmask16 keep = left >= TILE ? 0xffff : (__mmask16)((1u << left) - 1);
#if defined(HAS_TILES)
        if (by_tiles) multiply_by_tiles(values + row * padded, fours, deep, sums);
        else
#endif
          multiply_by_vectors(values + row * padded, fours, count, sums);
        __m512 by_row = some(scales + row, left), add = bias == NULL ? _mm512_setzero_ps() : some(bias + row, left);
        for (int half = 0; half < 2; half++) {
          vec a[LANES];
          __m512i z = _mm512_load_si512(zero + half * LANES);
          __m512 s = _mm512_load_ps(scale + half * LANES);
          for (int r = 0; r < TILE; r++) {
            __m512i all = _mm512_load_si512(sums + r * PANEL + half * LANES);
            all = _mm512_sub_epi32(all, _mm512_mullo_epi32(_mm512_set1_epi32(of_rows[row + r]), z));
            a[r] = (vec)_mm512_mul_ps(_mm512_cvtepi32_ps(all), s);
          }
          turn(a);
          for (int l = 0; l < LANES; l++) {
            int64_t i = token_of(half, l);
            if (i < tokens) _mm512_mask_storeu_ps(y + (t + i) * rows + row, keep, _mm512_add_ps(_mm512_mul_ps((__m512)a[l], by_row), add));
          }
        }
      }
    }
  }
  end_tiles(by_tiles);
  return 0;
}
#endif
