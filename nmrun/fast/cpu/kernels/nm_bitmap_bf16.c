/* Products of bfloat16 with any N:M matrix by AMX, on one thread, for few tokens. Follows nm_block_bf16.c in one translation unit, and needs
   VBMI2 as well.

   The matrix is a bitmap: a mask has a bit for each of DEEP columns of a row, and `values` has what the bits stand for. Both lie in the order
   of tiles of TILE rows, in these of tiles of columns, and in these of rows. One instruction spreads the values of a mask over a row of a
   tile, which stays in the first-level cache, and AMX multiplies it with up to PANEL tokens. So many tokens cost one pass over the matrix. */
#if defined(HAS_TILES) && defined(DEEP) && defined(__AVX512VBMI2__)

/* One tile; returns where the values of the next begin. */
static inline const uint16_t *spread(const uint16_t *values, const uint32_t *masks, uint16_t *tile) {
  for (int r = 0; r < TILE; r++) {
    _mm512_store_si512(tile + r * DEEP, _mm512_maskz_expandloadu_epi16(masks[r], values));
    values += __builtin_popcount(masks[r]);
  }
  return values;
}

/* sums[row][half][16 tokens] of one tile of rows, or of two, `deep` tiles of columns each; where `wide` is 0, of the first half alone. Two
   tiles of rows are two sums, of which neither waits for the other. */
static void multiply_bitmap(const uint16_t *const values[2], const uint32_t *const masks[2], int two, const uint16_t *pairs, int64_t deep, int wide,
                            float *sums) {
  _Alignas(64) uint16_t tiles[2][2][TILE * DEEP]; /* in turn: one is written while the other is read */
  const uint16_t *from[2] = {values[0], values[1]};
  const int line = 4 * PANEL;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < deep; k++) {
    uint16_t(*now)[TILE * DEEP] = tiles[k % 2];
    for (int j = 0; j <= two; j++) from[j] = spread(from[j], masks[j] + k * TILE, now[j]);
    LOAD_TILE(4, now[0], 2 * DEEP);
    LOAD_TILE(6, pairs + k * DEEP * PANEL, line);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
      LOAD_TILE(7, pairs + k * DEEP * PANEL + PANEL, line);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (two) {
      LOAD_TILE(5, now[1], 2 * DEEP);
      _tile_dpbf16ps(2, 5, 6);
      if (wide) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + LANES, line);
  _tile_stored(2, sums + TILE * PANEL, line);
  _tile_stored(3, sums + TILE * PANEL + LANES, line);
}

/* y = x S^T + bias as in nm_block_bf16.c, for tokens `first` to `last` and tiles of rows `begin` to `end`; the values of a tile of rows begin
   at its start[]. Returns 0, or 1 without memory. */
int nm_bitmap_bf16(const uint16_t *x, uint16_t *y, const float *bias, const uint16_t *values, const uint32_t *masks, const int64_t *start,
                   int64_t rows, int64_t columns, int64_t first, int64_t last, int64_t begin, int64_t end) {
  int64_t deep = tiles_of(columns, DEEP);
  uint16_t *pairs = (uint16_t *)scratch(deep * DEEP * PANEL / 2);
  if (pairs == NULL) return 1;
  begin_tiles(1);
  for (int64_t t = first; t < last; t += PANEL) {
    int64_t tokens = last - t < PANEL ? last - t : PANEL;
    turn_pairs(x + t * columns, tokens, columns, pairs);
    for (int64_t i = begin; i < end; i += 2) {
      _Alignas(64) float sums[2 * TILE * PANEL];
      int two = i + 1 < end;
      const uint16_t *from[2] = {values + start[i], values + start[i + two]};
      const uint32_t *by[2] = {masks + i * deep * TILE, masks + (i + two) * deep * TILE};
      multiply_bitmap(from, by, two, pairs, deep, tokens > LANES, sums);
      for (int j = 0; j <= two; j++) put_tile(sums + j * TILE * PANEL, bias, (i + j) * TILE, rows, tokens, 1, y + t * rows);
    }
  }
  end_tiles(1);
  return 0;
}
#endif
