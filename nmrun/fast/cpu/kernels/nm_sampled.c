/* The entries of y^T x that a sparse matrix keeps: the weight gradient where pruned weights get none. Follows nm_product.c in one
   translation unit.

   Both operands are turned as for a product. LANES entries of a row are summed side by side, then turned once, so that the sum over the
   lanes of each costs as much as one more vector. */

/* to[e] = sum over tokens of y[token, r] x[token, column of e] for the entries e of rows `begin` to `end`; y is (tokens, rows), x
   (tokens, columns), bfloat16 with low & 1 (x) and low & 2 (y). `to` is as long as the values. Returns 0, or 1 without memory. */
int nm_sampled(const void *x, const void *y, const uint8_t *index, const int32_t *start, int64_t rows, int64_t columns, int64_t tokens,
               int64_t begin, int64_t end, int low, float *to) {
  float *panel = scratch((columns + rows + LANES) * TOKENS), *gradient = panel + columns * TOKENS;
  if (panel == NULL) return 1;
  for (int64_t t = 0; t < tokens; t += TOKENS) {
    int64_t until = tokens - t < TOKENS ? tokens : t + TOKENS;
    if (until - t < TOKENS) memset(panel, 0, (columns + rows) * TOKENS * sizeof(float));
    if (low & 1) load_panel(x, columns, columns, t, until, 1, panel, TOKENS);
    else load_panel(x, columns, columns, t, until, 0, panel, TOKENS);
    if (low & 2) load_panel(y, rows, rows, t, until, 1, gradient, TOKENS);
    else load_panel(y, rows, rows, t, until, 0, gradient, TOKENS);
    for (int64_t b = 0; b * BLOCK < columns; b++) {
      const float *block = panel + b * BLOCK * TOKENS;
      for (int64_t r = begin; r < end; r++) {
        vec g[MOST];
        for (int v = 0; v < MOST; v++) g[v] = *(const vec *)(gradient + r * TOKENS + v * LANES);
        for (int64_t e = start[b * rows + r], last = start[b * rows + r + 1]; e < last; e += LANES) {
          int64_t count = last - e < LANES ? last - e : LANES;
          vec sums[LANES];
#pragma GCC unroll 16
          for (int i = 0; i < LANES; i++) {
            const float *p = block + index[i < count ? e + i : e] * TOKENS;
            sums[i] = g[0] * *(const vec *)p;
            for (int v = 1; v < MOST; v++) sums[i] += g[v] * *(const vec *)(p + v * LANES);
          }
          turn(sums);
#pragma GCC unroll 16
          for (int i = 1; i < LANES; i++) sums[0] += sums[i];
          if (t == 0) memcpy(to + e, sums, count * sizeof(float));
          else
            for (int i = 0; i < count; i++) to[e + i] += sums[0][i];
        }
      }
    }
  }
  return 0;
}
