/* Float32 matrices with many zeros into what nm_product.c reads, by their rows and by their columns.

   `taps` matrices (rows, columns) lie side by side in one of (rows, taps * columns): a convolution has one for each position of its kernel.
   By rows: the non-zeros of row r in block b (BLOCK columns each, counted through all taps) lie at start[b * rows + r] up to
   start[b * rows + r + 1], `index` has their columns within the block. By columns: the same of the transposes. */
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef BLOCK
#define BLOCK 128 /* as in nm_product.c */
#endif

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
void nm_count(const float *matrix, int64_t taps, int64_t rows, int64_t columns, int64_t begin, int64_t end, int32_t *start) {
  for (int64_t r = begin; r < end; r++)
    for (int64_t b = 0; b < taps * blocks(columns); b++) {
      const float *from = element(matrix, taps, columns, r, b);
      int32_t count = 0;
      for (int64_t c = 0; c < width(columns, b); c++) count += from[c] != 0.0f;
      start[b * rows + r + 1] = count;
    }
}

/* Counts into where each begins; returns how many there are in all. */
int64_t nm_starts(int32_t *start, int64_t count) {
  int64_t sum = 0;
  start[0] = 0;
  for (int64_t i = 1; i <= count; i++) start[i] = (int32_t)(sum += start[i]);
  return sum;
}

void nm_fill(const float *matrix, int64_t taps, int64_t rows, int64_t columns, int64_t begin, int64_t end, const int32_t *start, float *values,
             uint8_t *index) {
  for (int64_t b = 0; b < taps * blocks(columns); b++)
    for (int64_t r = begin; r < end; r++) {
      const float *from = element(matrix, taps, columns, r, b);
      int64_t c = 0, to = start[b * rows + r], until = start[b * rows + r + 1];
#if defined(__AVX512F__) /* ten times as fast as one by one */
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      for (; c + 16 <= width(columns, b); c += 16) {
        __m512 v = _mm512_loadu_ps(from + c);
        __mmask16 filled = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        int count = __builtin_popcount(filled);
        __mmask16 stored = (__mmask16)((1u << count) - 1); /* the next place may be another thread's */
        _mm512_mask_storeu_ps(values + to, stored, _mm512_maskz_compress_ps(filled, v));
        __m512i columns_of = _mm512_maskz_compress_epi32(filled, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)c)));
        _mm512_mask_cvtepi32_storeu_epi8(index + to, stored, columns_of);
        to += count;
      }
#endif
      for (; to < until; c++) { /* a zero is written and written over: no branch to guess */
        values[to] = from[c], index[to] = (uint8_t)c;
        to += from[c] != 0.0f;
      }
    }
}

/* From what is stored by rows: turned_start[b * columns + c + 1] is how many non-zeros column c has in block b of rows, counted through all
   taps, for blocks `begin` to `end`. */
void nm_count_turned(const uint8_t *index, const int32_t *start, int64_t rows, int64_t columns, int64_t begin, int64_t end,
                     int32_t *turned_start) {
  for (int64_t block = begin; block < end; block++)
    for (int64_t b = 0; b < blocks(columns); b++) {
      int64_t tap = block / blocks(rows), first = (tap * blocks(columns) + b) * rows + block % blocks(rows) * BLOCK;
      int32_t count[BLOCK] = {0};
      for (int64_t e = start[first]; e < start[first + width(rows, block)]; e++) count[index[e]]++;
      memcpy(turned_start + block * columns + b * BLOCK + 1, count, width(columns, b) * sizeof(int32_t));
    }
}

void nm_fill_turned(const float *values, const uint8_t *index, const int32_t *start, int64_t rows, int64_t columns, int64_t begin,
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
}

/* Rows `begin` to `end` of the matrix (rows, taps * columns) with its zeros. */
void nm_unpack(const float *values, const uint8_t *index, const int32_t *start, int64_t taps, int64_t rows, int64_t columns, int64_t begin,
               int64_t end, float *matrix) {
  memset(matrix + begin * taps * columns, 0, (end - begin) * taps * columns * sizeof(float));
  for (int64_t b = 0; b < taps * blocks(columns); b++)
    for (int64_t r = begin; r < end; r++) {
      float *to = (float *)element(matrix, taps, columns, r, b);
      for (int64_t e = start[b * rows + r]; e < start[b * rows + r + 1]; e++) to[index[e]] = values[e];
    }
}
