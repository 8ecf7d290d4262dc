/* Convolutions of bfloat16 with a sparse weight, forward and for the gradient of the input. Follows nm_bf16.c and nm_window.c in one
   translation unit, and is empty where nm_bf16.c is.

   MOST output pixels are a panel, as MOST tokens are of a product. The weight at one position of the kernel (a tap) is a matrix, in blocks of
   its own. The channels that a tap reads are copied side by side, for as many taps at once as the first-level cache holds. Images are stored
   with their channels innermost.

   Pixels of a row of all images follow one another; backward with a stride, first those columns that the same taps reach. So a tap is mostly
   within the image for all pixels of a panel or for none, and then it is left out. */
#if defined(SEGMENTS)

#ifndef DEPTH
#define DEPTH 20 /* segments of a panel that are multiplied at once: as many KB */
#endif

typedef struct {
  int64_t row, image, column;
} Pixel;

/* Columns of a row that follow one another are so far apart. */
static int64_t step_of(const Geometry *g) { return g->backward ? g->stride[1] : 1; }

static Pixel pixel(const Geometry *g, int64_t images, int64_t at) {
  int64_t step = step_of(g), width = g->out_width, first = 0, of_row = at % (images * width), count;
  for (; count = (width - first + step - 1) / step, of_row >= images * count; first++) of_row -= images * count;
  return (Pixel){at / (images * width), of_row / count, first + of_row % count * step};
}

static Pixel next(const Geometry *g, int64_t images, Pixel p) {
  int64_t step = step_of(g), first = p.column % step;
  if ((p.column += step) < g->out_width) return p;
  if (++p.image < images) return (Pixel){p.row, p.image, first};
  if (++first < step && first < g->out_width) return (Pixel){p.row, 0, first};
  return (Pixel){p.row + 1, 0, 0};
}

/* Add what the slots of one tile say in `count` blocks, whose segments lie in the panel one after another, to the sums (MOST, TILE). */
static inline void add_taps(const uint16_t *panel, const Matrix *m, int64_t tile, const int64_t *blocks, int count, int segments, float *sums) {
  __m512 a[MOST];
#pragma GCC unroll 16
  for (int t = 0; t < MOST; t++) a[t] = _mm512_setzero_ps();
  for (int b = 0; b < count; b++) {
    Slots of = slots_of(m, blocks[b], tile);
    for (int s = 0; s < segments; s++, panel += MOST * SEGMENT)
      for (int i = of.counts[s]; i; i--, of.values += SEGMENT, of.index += SEGMENT) {
        __m512i v = _mm512_loadu_si512(of.values), at = places(of.index);
#pragma GCC unroll 16
        for (int t = 0; t < MOST; t++) a[t] = dot(a[t], _mm512_permutexvar_epi16(at, _mm512_load_si512(panel + t * SEGMENT)), v);
      }
  }
#pragma GCC unroll 16
  for (int t = 0; t < MOST; t++) _mm512_store_ps(sums + t * TILE, _mm512_add_ps(_mm512_load_ps(sums + t * TILE), a[t]));
}

/* For each coordinate that is written and each tap, what is read there, times `unit`, or -1. */
static void read_by(const Geometry *g, int axis, int64_t unit, int64_t *to) {
  int64_t size = axis == 0 ? g->out_height : g->out_width;
  for (int64_t p = 0; p < size; p++)
    for (int64_t tap = 0; tap < g->taps[axis]; tap++) {
      int64_t at = source(g, axis, p, tap);
      *to++ = at < 0 ? -1 : at * unit;
    }
}

/* Channels of MOST places side by side, as in load(); zeros where the place is negative. */
static inline void load_tap(const uint16_t *x, const int64_t *places, int64_t channels, uint16_t *to) {
  static const uint16_t outside[BLOCK];
  uint32_t rest = first_of(channels % SEGMENT, SEGMENT);
  for (int t = 0; t < MOST; t++) {
    const uint16_t *from = places[t] < 0 ? outside : x + places[t];
    uint16_t *of = to + t * SEGMENT;
    for (int64_t c = channels; c >= SEGMENT; c -= SEGMENT, from += SEGMENT, of += MOST * SEGMENT) _mm512_store_si512(of, _mm512_loadu_si512(from));
    if (rest) _mm512_store_si512(of, _mm512_maskz_loadu_epi16(rest, from));
  }
}

static __attribute__((noinline)) int convolve(const uint16_t *x, uint16_t *y, const float *bias, const Matrix *m, const Geometry *g, int64_t images,
                                              int64_t begin, int64_t end) {
  int64_t parts = (g->columns + BLOCK - 1) / BLOCK, taps = g->taps[0] * g->taps[1];
  int64_t segments = g->columns < BLOCK ? (g->columns + SEGMENT - 1) / SEGMENT : SEGMENTS, groups = (taps * parts * segments + DEPTH - 1) / DEPTH;
  int64_t most = (taps * parts + groups - 1) / groups;
  float *sums = scratch(MOST * (m->tiles * TILE + most * segments * SEGMENT / 2) +
                        2 * (most + MOST * taps + g->out_height * g->taps[0] + g->out_width * g->taps[1]));
  if (sums == NULL) return 1;
  uint16_t *panel = (uint16_t *)(sums + MOST * m->tiles * TILE);
  int64_t *places = (int64_t *)(panel + MOST * most * segments * SEGMENT), *blocks = places + MOST * taps;
  int64_t *rows = blocks + most, *columns = rows + g->out_height * g->taps[0];
  read_by(g, 0, g->width * g->columns, rows), read_by(g, 1, g->columns, columns);
  Pixel p = pixel(g, images, begin);
  for (int64_t first = begin; first < end; first += MOST) {
    int tokens = end - first < MOST ? (int)(end - first) : MOST;
    int64_t to[MOST];
    memset(places, -1, MOST * taps * sizeof(int64_t));
    for (int t = 0; t < tokens; t++, p = next(g, images, p)) {
      int64_t from = p.image * g->height * g->width * g->columns, *of = places + t;
      to[t] = ((p.image * g->out_height + p.row) * g->out_width + p.column) * g->rows;
      for (int64_t i = 0; i < g->taps[0]; i++)
        for (int64_t j = 0; j < g->taps[1]; j++, of += MOST) {
          int64_t row = rows[p.row * g->taps[0] + i], column = columns[p.column * g->taps[1] + j];
          *of = (row | column) < 0 ? -1 : from + row + column;
        }
    }
    for (int64_t i = 0; i < m->tiles; i++) {
      __m512 initial = bias == NULL ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(first_of(g->rows - i * TILE, TILE), bias + i * TILE);
      for (int t = 0; t < MOST; t++) _mm512_store_ps(sums + (i * MOST + t) * TILE, initial);
    }
    int count = 0;
    for (int64_t b = 0; b < taps * parts; b++) {
      const int64_t *of = places + b / parts * MOST;
      int64_t channel = b % parts * BLOCK, within = 0;
      for (int t = 0; t < MOST; t++) within |= ~of[t];
      if (within < 0) {
        load_tap(x + channel, of, g->columns - channel < BLOCK ? g->columns - channel : BLOCK, panel + count * segments * MOST * SEGMENT);
        blocks[count++] = b;
      }
      if (count && ((b + 1) % most == 0 || b + 1 == taps * parts)) { /* the same taps are added up at once in every panel */
        for (int64_t tile = 0; tile < m->tiles; tile++)
          add_taps(panel, m, tile, blocks, count, (int)segments, sums + tile * MOST * TILE);
        count = 0;
      }
    }
    for (int t = 0; t < tokens; t++)
      for (int64_t i = 0; i < m->tiles; i++)
        _mm256_mask_storeu_epi16(y + to[t] + i * TILE, first_of(g->rows - i * TILE, TILE),
                                 (__m256i)narrowed(*(const vec *)(sums + (i * MOST + t) * TILE)));
  }
  return 0;
}

/* Panels `begin` to `end` of MOST output pixels. x is (images, height, width, columns), y (images, height, width, rows), bfloat16; the bias
   is float32, or NULL. Returns 0, or 1 without memory. */
int nm_bf16_convolution(const uint16_t *x, uint16_t *y, const float *bias, const uint16_t *values, const uint8_t *index, const uint8_t *counts,
                        const int32_t *start, const Geometry *g, int64_t images, int64_t begin, int64_t end) {
  Matrix m = {values, index, counts, start, (g->rows + TILE - 1) / TILE, 0};
  unsigned before = _mm_getcsr();
  _mm_setcsr(ROUNDING);
  int failed = convolve(x, y, bias, &m, g, images, begin, end);
  _mm_setcsr(before);
  return failed;
}
#endif
