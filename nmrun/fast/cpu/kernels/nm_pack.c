/* Float32 matrices with many zeros into what nm_product.c reads, by their rows and by their columns. Follows nm_product.c in one translation
   unit.

   `taps` matrices (rows, columns) lie side by side in one of (rows, taps * columns): a convolution has one for each position of its kernel.
   By rows: the non-zeros of row r in block b (BLOCK columns each, counted through all taps) lie at start[b * rows + r] up to
   start[b * rows + r + 1], `index` has their columns within the block. By columns: the same of the transposes. */

static int64_t blocks(int64_t columns) { return (columns + BLOCK - 1) / BLOCK; }

static int64_t width(int64_t columns, int64_t block) {
  int64_t left = columns - block % blocks(columns) * BLOCK;
  return left < BLOCK ? left : BLOCK;
}

/* The first element of row r in a block. */
static const float *element(const float *matrix, int64_t taps, int64_t columns, int64_t r, int64_t block) {
  return matrix + r * taps * columns + block / blocks(columns) * columns + block % blocks(columns) * BLOCK;
}

/* start[b * rows + r + 1]: how many non-zeros row r has in block b, for rows `begin` to `end`. */
int nm_count(const float *matrix, int64_t taps, int64_t rows, int64_t columns, int64_t begin, int64_t end, int32_t *start) {
  for (int64_t r = begin; r < end; r++)
    for (int64_t b = 0; b < taps * blocks(columns); b++) {
      const float *from = element(matrix, taps, columns, r, b);
      int32_t count = 0;
      for (int64_t c = 0; c < width(columns, b); c++) count += from[c] != 0.0f;
      start[b * rows + r + 1] = count;
    }
  return 0;
}

/* Counts into where each begins; returns how many there are in all. */
int64_t nm_starts(int32_t *start, int64_t count) {
  int64_t sum = 0;
  start[0] = 0;
  for (int64_t i = 1; i <= count; i++) start[i] = (int32_t)(sum += start[i]);
  return sum;
}

/* The non-zeros of `count` floats behind those that are there: values from `to` on, and where they were. Nothing is written at `until` or
   beyond, which may be another thread's. Returns where the next go. */
static inline int64_t append(const float *from, int64_t count, float *values, uint8_t *index, int64_t to, int64_t until) {
  int64_t c = 0;
#if defined(__AVX512F__) /* ten times as fast as one by one */
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; c + 16 <= count; c += 16) {
    __m512 v = _mm512_loadu_ps(from + c);
    __mmask16 filled = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    int nonzeros = __builtin_popcount(filled);
    __mmask16 stored = (__mmask16)((1u << nonzeros) - 1);
    _mm512_mask_storeu_ps(values + to, stored, _mm512_maskz_compress_ps(filled, v));
    __m512i places = _mm512_maskz_compress_epi32(filled, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)c)));
    _mm512_mask_cvtepi32_storeu_epi8(index + to, stored, places);
    to += nonzeros;
  }
#endif
  for (; c < count && to < until; c++) { /* a zero is written and written over: no branch to guess */
    values[to] = from[c], index[to] = (uint8_t)c;
    to += from[c] != 0.0f;
  }
  return to;
}

int nm_fill(const float *matrix, int64_t taps, int64_t rows, int64_t columns, int64_t begin, int64_t end, const int32_t *start, float *values,
             uint8_t *index) {
  for (int64_t b = 0; b < taps * blocks(columns); b++)
    for (int64_t r = begin; r < end; r++)
      append(element(matrix, taps, columns, r, b), width(columns, b), values, index, start[b * rows + r], start[b * rows + r + 1]);
  return 0;
}

/* From what is stored by rows: turned_start[b * columns + c + 1] is how many non-zeros column c has in block b of rows, counted through all
   taps, for blocks `begin` to `end`. */
int nm_count_turned(const uint8_t *index, const int32_t *start, int64_t rows, int64_t columns, int64_t begin, int64_t end,
                     int32_t *turned_start) {
  for (int64_t block = begin; block < end; block++)
    for (int64_t b = 0; b < blocks(columns); b++) {
      int64_t tap = block / blocks(rows), first = (tap * blocks(columns) + b) * rows + block % blocks(rows) * BLOCK;
      int32_t count[BLOCK] = {0};
      for (int64_t e = start[first]; e < start[first + width(rows, block)]; e++) count[index[e]]++;
      memcpy(turned_start + block * columns + b * BLOCK + 1, count, width(columns, b) * sizeof(int32_t));
    }
  return 0;
}

int nm_fill_turned(const float *values, const uint8_t *index, const int32_t *start, int64_t rows, int64_t columns, int64_t begin,
                    int64_t end, const int32_t *turned_start, float *turned_values, uint8_t *turned_index) {
  for (int64_t block = begin; block < end; block++)
    for (int64_t b = 0; b < blocks(columns); b++) {
      int64_t tap = block / blocks(rows), first = (tap * blocks(columns) + b) * rows + block % blocks(rows) * BLOCK;
      int32_t to[BLOCK];
      memcpy(to, turned_start + block * columns + b * BLOCK, width(columns, b) * sizeof(int32_t));
      for (int64_t r = 0; r < width(rows, block); r++)
        for (int64_t e = start[first + r]; e < start[first + r + 1]; e++) {
          int32_t place = to[index[e]]++;
          turned_values[place] = values[e], turned_index[place] = (uint8_t)r;
        }
    }
  return 0;
}

#if defined(__AVX512F__)
/* 16 rows of 16 floats, `stride` apart, into columns, BLOCK apart; what is beyond `rows` and `columns` becomes 0. */
static void turn_tile(const float *from, int64_t stride, int64_t rows, int64_t columns, float *to) {
  vec tile[LANES];
  __mmask16 wide = (__mmask16)((1u << (columns < 16 ? columns : 16)) - 1);
  for (int64_t r = 0; r < 16; r++) tile[r] = (vec)(r < rows ? _mm512_maskz_loadu_ps(wide, from + r * stride) : _mm512_setzero_ps());
  turn(tile);
  for (int j = 0; j < 16; j++) _mm512_storeu_ps(to + j * BLOCK, (__m512)tile[j]);
}

/* What nm_count_turned and nm_fill_turned do, from the matrix itself: a register at a time, whatever is in it. That is faster where more than
   a quarter is. */
int nm_turned(const float *matrix, int64_t taps, int64_t rows, int64_t columns, int64_t begin, int64_t end, const int32_t *start,
               int32_t *turned_start, float *values, uint8_t *index) {
  float tile[16 * BLOCK];
  turned_start[0] = 0;
  for (int64_t block = 0, to = 0, until; block < end; block++, to = until) {
    int64_t tap = block / blocks(rows), first = block % blocks(rows) * BLOCK, high = width(rows, block), step = taps * columns;
    until = to;
    for (int64_t b = tap * blocks(columns); b < (tap + 1) * blocks(columns); b++)
      until += start[b * rows + first + high] - start[b * rows + first];
    const float *from = matrix + first * step + tap * columns;
    for (int64_t c = 0; c < columns && block >= begin; c += 16) {
      for (int64_t r = 0; r < high; r += 16) turn_tile(from + r * step + c, step, high - r, columns - c, tile + r);
      for (int64_t j = 0; j < 16 && c + j < columns; j++) {
        to = append(tile + j * BLOCK, high, values, index, to, until);
        turned_start[block * columns + c + j + 1] = (int32_t)to;
      }
    }
  }
  return 0;
}
#endif

/* Rows `begin` to `end` of the matrix (rows, taps * columns) with its zeros. */
int nm_unpack(const float *values, const uint8_t *index, const int32_t *start, int64_t taps, int64_t rows, int64_t columns, int64_t begin,
               int64_t end, float *matrix) {
  memset(matrix + begin * taps * columns, 0, (end - begin) * taps * columns * sizeof(float));
  for (int64_t b = 0; b < taps * blocks(columns); b++)
    for (int64_t r = begin; r < end; r++) {
      float *to = (float *)element(matrix, taps, columns, r, b);
      for (int64_t e = start[b * rows + r]; e < start[b * rows + r + 1]; e++) to[index[e]] = values[e];
    }
  return 0;
}
