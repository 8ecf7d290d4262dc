/* Convolutions with a sparse weight, forward and for the gradient of the input. Follows nm_window.c and nm_product.c in one translation unit.

   Images lie in the lanes: a pixel of up to TOKENS images is a panel, and the weight at one position of the kernel (a tap) is a matrix. So there is
   no edge to pad and nothing to copy for overlapping windows: a tap that falls outside of the image is left out. Images are stored with
   their channels innermost. */

/* The most images of one call: there are fewer registers without AVX. */
int nm_images(void) { return TOKENS; }

/* The numbers of a column of a panel of so many images. */
int nm_lanes(int64_t images) { return lanes((int)((images + LANES - 1) / LANES)); }

/* Turn pixels `begin` to `end` of images `first` to `last`: pixel p of `turned` is a panel (columns, lanes). */
int nm_turn(const float *x, const Geometry *g, int64_t first, int64_t last, int64_t begin, int64_t end, float *turned) {
  int64_t stride = g->height * g->width * g->columns;
  int apart = nm_lanes(last - first);
  for (int64_t p = begin; p < end; p++)
    load_panel(x + p * g->columns, stride, g->columns, first, last, 0, turned + p * g->columns * apart, apart);
  return 0;
}

/* Rows of output pixels `begin` to `end` of images `first` to `last`. Returns 0, or 1 without memory. */
int nm_convolution(const float *turned, float *y, const float *bias, const float *values, const uint8_t *index, const int32_t *start,
                   const Geometry *g, int64_t first, int64_t last, int64_t begin, int64_t end) {
  int64_t blocks = (g->columns + BLOCK - 1) / BLOCK, stride = g->out_height * g->out_width * g->rows;
  int vectors = (int)((last - first + LANES - 1) / LANES), apart = nm_lanes(last - first);
  float *sums = scratch(g->rows * TOKENS);
  if (sums == NULL) return 1;
  for (int64_t row = begin; row < end; row++)
    for (int64_t column = 0; column < g->out_width; column++) {
      begin_sums(sums, bias, 0, g->rows);
      for (int64_t i = 0; i < g->taps[0]; i++)
        for (int64_t j = 0; j < g->taps[1]; j++) {
          int64_t from_row = source(g, 0, row, i), from_column = source(g, 1, column, j);
          if (from_row < 0 || from_column < 0) continue;
          const float *panel = turned + (from_row * g->width + from_column) * g->columns * apart;
          const int32_t *from = start + (i * g->taps[1] + j) * blocks * g->rows;
          for (int64_t b = 0; b < blocks; b++)
            add_block(panel + b * BLOCK * apart, 1, values, index, from + b * g->rows, 0, g->rows, vectors, sums);
        }
      store_panel(sums, stride, 0, g->rows, first, last, 0, y + (row * g->out_width + column) * g->rows);
    }
  return 0;
}
