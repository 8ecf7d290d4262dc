/* Products of float32 matrices with a sparse one, on one thread. Follows nm_vectors.c in one translation unit.

   The sparse matrix is stored row by row within blocks of BLOCK columns: the non-zeros of row r in block b are values[start[b * rows + r]]
   up to values[start[b * rows + r + 1]], and index[] has their columns, counted from the block's first.

   Tokens lie in the lanes. A panel of TOKENS tokens is turned so that the tokens of one column are one piece of memory; each non-zero is
   then one number times that piece. A block of a panel stays in the first-level cache, and no lane waits for another: it is this that
   makes every N:M as fast as its count of non-zeros allows. */
#if LANES == 4 && defined(__x86_64__)
#define TOKENS 32 /* there are 16 registers of 4 */
#else
#define TOKENS 64
#endif
#define BLOCK 128  /* columns: 32 KB of a panel */
#define AT_ONCE 512 /* rows: their sums, 128 KB, stay in the second-level cache */
#define MOST (TOKENS / LANES)
#define TILE 16 /* rows, see nm_token.c */

/* Element (row, column) of a matrix of float32, or bfloat16 with `low`. */
static inline const char *at(const void *matrix, int64_t row, int64_t column, int64_t columns, int low) {
  return (const char *)matrix + (row * columns + column) * (low ? 2 : 4);
}

static inline __attribute__((always_inline)) vec read(const char *from, int64_t count, int low) {
  vec v = {0};
  half h = {0};
  if (!low) return memcpy(&v, from, 4 * count), v;
  return memcpy(&h, from, 2 * count), widened(h);
}

static inline __attribute__((always_inline)) void write(char *to, vec v, int64_t count, int low) {
  half h;
  if (low) h = narrowed(v), memcpy(to, &h, 2 * count);
  else memcpy(to, &v, 4 * count);
}

/* Tokens `first` to `last` of x, `columns` numbers each and `stride` from one to the next, turned: element (column, token) at
   panel[column * apart + token]. */
static inline __attribute__((always_inline)) void load_panel(const void *x, int64_t stride, int64_t columns, int64_t first, int64_t last, int low,
                                                             float *panel, int apart) {
  for (int64_t c = 0; c < columns; c += LANES)
    for (int64_t t = first; t < last; t += LANES) {
      int64_t height = last - t, width = columns - c;
      float *to = panel + c * apart + t - first;
      vec tile[LANES] = {0};
      if (width >= LANES && height >= LANES) { /* the compiler keeps a whole tile in registers */
        for (int i = 0; i < LANES; i++) tile[i] = read(at(x, t + i, c, stride, low), LANES, low);
        turn(tile);
        for (int i = 0; i < LANES; i++) *(vec *)(to + i * apart) = tile[i];
      } else {
        if (width > LANES) width = LANES;
        for (int i = 0; i < LANES && i < height; i++) tile[i] = read(at(x, t + i, c, stride, low), width, low);
        turn(tile);
        for (int i = 0; i < width; i++) *(vec *)(to + i * apart) = tile[i];
      }
    }
}

/* The inverse: the sums of rows `begin` to `end` into y, `stride` from one token to the next. */
static inline __attribute__((always_inline)) void store_panel(const float *sums, int64_t stride, int64_t begin, int64_t end, int64_t first,
                                                              int64_t last, int low, void *y) {
  for (int64_t r = begin; r < end; r += LANES)
    for (int64_t t = first; t < last; t += LANES) {
      int64_t height = last - t, width = end - r;
      const float *from = sums + (r - begin) * TOKENS + t - first;
      vec tile[LANES] = {0};
      if (width >= LANES && height >= LANES) {
        for (int i = 0; i < LANES; i++) tile[i] = *(const vec *)(from + i * TOKENS);
        turn(tile);
        for (int i = 0; i < LANES; i++) write((char *)at(y, t + i, r, stride, low), tile[i], LANES, low);
      } else {
        if (width > LANES) width = LANES;
        for (int i = 0; i < width; i++) tile[i] = *(const vec *)(from + i * TOKENS);
        turn(tile);
        for (int i = 0; i < LANES && i < height; i++) write((char *)at(y, t + i, r, stride, low), tile[i], width, low);
      }
    }
}

/* Element e of a row: `stride` elements from one to the next, bfloat16 with `low`. */
static inline __attribute__((always_inline)) float value(const void *values, int64_t e, int64_t stride, int low) {
  if (!low) return ((const float *)values)[e * stride];
  uint32_t wide = (uint32_t)((const uint16_t *)values)[e * stride] << 16;
  float v;
  return memcpy(&v, &wide, 4), v;
}

/* Add the non-zeros of one row times their columns of the panel, which lie `apart`. */
static inline __attribute__((always_inline)) void add_row(const float *restrict panel, int apart, const void *restrict values,
                                                          const uint8_t *restrict index, int64_t count, float *restrict sums, int vectors,
                                                          int64_t stride, int low) {
  vec even[MOST], odd[MOST];
  for (int v = 0; v < vectors; v++) even[v] = odd[v] = (vec){0};
  int64_t e = 0;
#if LANES == 16 /* two sums each: four would not fill the units of a processor that adds twice a cycle */
  for (; e + 1 < count; e += 2) {
    const float *p = panel + index[e * stride] * apart, *q = panel + index[(e + 1) * stride] * apart;
    float first = value(values, e, stride, low), second = value(values, e + 1, stride, low);
    for (int v = 0; v < vectors; v++) {
      even[v] += first * *(const vec *)(p + v * LANES);
      odd[v] += second * *(const vec *)(q + v * LANES);
    }
  }
#endif
  for (; e < count; e++) {
    const float *p = panel + index[e * stride] * apart;
    for (int v = 0; v < vectors; v++) even[v] += value(values, e, stride, low) * *(const vec *)(p + v * LANES);
  }
  for (int v = 0; v < vectors; v++) *(vec *)(sums + v * LANES) += even[v] + odd[v];
}

/* The sums of rows `begin` to `end` before the first product. */
static void begin_sums(float *sums, const float *bias, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    vec initial = (vec){0} + (bias == NULL ? 0.0f : bias[r]);
    for (int v = 0; v < MOST; v++) *(vec *)(sums + (r - begin) * TOKENS + v * LANES) = initial;
  }
}

/* The lanes of so many vectors that add_block computes with. */
static inline int lanes(int vectors) { return LANES * (vectors <= 2 ? vectors : vectors <= MOST / 2 ? MOST / 2 : MOST); }

/* Add rows `begin` to `end` of one block of the matrix times its columns of the panel, which lie TOKENS apart, or `tight`, as many as
   there are lanes; `start` is that of the block's row 0. */
static void add_block(const float *panel, int tight, const float *values, const uint8_t *index, const int32_t *start, int64_t begin,
                      int64_t end, int vectors, float *sums) {
#define ROWS(VECTORS) \
  for (int64_t r = begin; r < end; r++) \
    add_row(panel, tight ? VECTORS * LANES : TOKENS, values + start[r], index + start[r], start[r + 1] - start[r], \
            sums + (r - begin) * TOKENS, VECTORS, 1, 0)
  if (vectors == 1) ROWS(1);
  else if (vectors == 2) ROWS(2);
  else if (vectors <= MOST / 2) ROWS(MOST / 2);
  else ROWS(MOST);
}

/* Fetch one of TILE parts of what follows a tile: a row's values lie apart, so that a tile's first row would wait for each. Of few
   slots there is nothing to gain. */
static inline __attribute__((always_inline)) void ahead(const char *values, const uint8_t *index, int64_t slots, int64_t part, int low) {
  int64_t bytes = slots * TILE * (low ? 2 : 4);
  if (slots <= BLOCK / TILE) return;
  for (int64_t i = part * 64; i < bytes; i += TILE * 64) __builtin_prefetch(values + i);
  for (int64_t i = part * 64; i < slots * TILE; i += TILE * 64) __builtin_prefetch(index + i);
}

/* The same of a tiled matrix, its values bfloat16 with `low`; `start` is that of the block's tile 0. */
static inline __attribute__((always_inline)) void add_tiles(const float *panel, const void *values, const uint8_t *index,
                                                            const int32_t *start, int64_t begin, int64_t end, int vectors, float *sums,
                                                            int low) {
#define TILES(VECTORS)                                                                                     \
  for (int64_t r = begin; r < end; r++) {                                                                  \
    const int32_t *tile = start + r / TILE;                                                                \
    int64_t first = (int64_t)tile[0] * TILE + r % TILE;                                                    \
    ahead((const char *)values + (int64_t)tile[1] * TILE * (low ? 2 : 4), index + (int64_t)tile[1] * TILE, tile[1] - tile[0], r % TILE, low); \
    add_row(panel, TOKENS, (const char *)values + first * (low ? 2 : 4), index + first, tile[1] - tile[0], \
            sums + (r - begin) * TOKENS, VECTORS, TILE, low);                                              \
  }
  if (vectors == 1) TILES(1)
  else if (vectors == 2) TILES(2)
  else if (vectors <= MOST / 2) TILES(MOST / 2)
  else TILES(MOST)
}

/* The same where columns are pieces of memory already: x is (columns, all tokens). */
static void load_columns(const float *x, int64_t columns, int64_t all, int64_t first, int64_t last, float *panel) {
  for (int64_t c = 0; c < columns; c++) {
    const float *from = x + c * all + first;
    float *to = panel + c * TOKENS;
    if (last - first == TOKENS) memcpy(to, from, TOKENS * sizeof(float));
    else {
      memset(to, 0, TOKENS * sizeof(float));
      memcpy(to, from, (last - first) * sizeof(float));
    }
  }
}

/* y = x S^T + bias for tokens `first` to `last` of `all` and rows `begin` to `end` of S (rows, columns): x is (all, columns), y (all,
   rows). LOW_X, LOW_Y: x, y are bfloat16, else float32; so is the bias, or NULL. TURNED: x is (columns, all), y (rows, all), float32.
   TILED: S is stored as nm_token.c says, its values bfloat16 with LOW_VALUES. Returns 0, or 1 without memory. */
enum { LOW_X = 1, LOW_Y = 2, TURNED = 4, TILED = 8, LOW_VALUES = 16 };

int nm_product(const void *x, void *y, const float *bias, const void *values, const uint8_t *index, const int32_t *start, int64_t rows,
               int64_t columns, int64_t all, int64_t first, int64_t last, int64_t begin, int64_t end, int flags) {
  float *panel = scratch((columns + AT_ONCE) * TOKENS);
  if (panel == NULL) return 1;
  float *sums = panel + columns * TOKENS;
  for (int64_t t = first; t < last; t += TOKENS) {
    int64_t until = last - t < TOKENS ? last : t + TOKENS;
    int vectors = (int)((until - t + LANES - 1) / LANES);
    if (flags & TURNED) load_columns(x, columns, all, t, until, panel);
    else if (flags & LOW_X) load_panel(x, columns, columns, t, until, 1, panel, TOKENS);
    else load_panel(x, columns, columns, t, until, 0, panel, TOKENS);
    for (int64_t r0 = begin; r0 < end; r0 += AT_ONCE) {
      int64_t r1 = end - r0 < AT_ONCE ? end : r0 + AT_ONCE;
      begin_sums(sums, bias, r0, r1);
      for (int64_t b = 0; b * BLOCK < columns; b++) {
        const float *block = panel + b * BLOCK * TOKENS;
        const int32_t *tiles = start + b * ((rows + TILE - 1) / TILE);
        if (!(flags & TILED)) add_block(block, 0, values, index, start + b * rows, r0, r1, vectors, sums);
        else if (flags & LOW_VALUES) add_tiles(block, values, index, tiles, r0, r1, vectors, sums, 1);
        else add_tiles(block, values, index, tiles, r0, r1, vectors, sums, 0);
      }
      if (flags & TURNED)
        for (int64_t r = r0; r < r1; r++) memcpy((float *)y + r * all + t, sums + (r - r0) * TOKENS, (until - t) * sizeof(float));
      else if (flags & LOW_Y) store_panel(sums, rows, r0, r1, t, until, 1, y);
      else store_panel(sums, rows, r0, r1, t, until, 0, y);
    }
  }
  return 0;
}
