/* One step of Adam over a float32 weight, with what a recipe does around it: it edits the gradient, and the updated weight is projected
   while it is in the cache. Follows nm_project.c, or for V:N:M nm_blocks.c, in one translation unit.

   The arithmetic, where it fuses a multiplication with an addition and where not, is that of torch.optim.Adam(fused=True) and of the
   recipes in torch: the same bits. */
#include <stddef.h>

#define PIECE 1024 /* elements: five streams of them fit into the first-level cache */

typedef struct {
  float shrink, coupled, lerp, beta2, rest2, root, eps, step; /* of Adam */
  float decay, spared;                                        /* of the gradient of pruned weights: added per weight, multiplied by */
  float factor, scale;                                        /* of nm_project */
} Scalars;

enum { AS_IS, DECAYED, SCALED };

/* With `frozen`, `second` is a constant denominator. A weight is pruned where the mask says so; without one, where the projection has changed it. */
static inline __attribute__((always_inline)) void update(float *restrict weight, const float *restrict grad, float *restrict first,
                                                         float *restrict second, float *restrict out, const uint8_t *restrict mask,
                                                         int64_t count, const Scalars *s, int edit, int has_mask, int coupled, int frozen) {
  const float shrink = s->shrink, wd = s->coupled, lerp = s->lerp, beta2 = s->beta2, rest2 = s->rest2, root = s->root;
  const float eps = s->eps, step = s->step, decay = s->decay, spared = s->spared;
  for (int64_t i = 0; i < count; i++) {
    float w = weight[i], g = grad[i], m = first[i], v = second[i];
    if (edit == DECAYED) g = fmaf(w - out[i], decay, g);
    if (edit == SCALED) g *= (has_mask ? mask[i] != 0 : out[i] == w) ? 1.0f : spared;
    if (coupled) g = fmaf(w, wd, g);
    else w *= shrink;
    m = lerp < 0.5f ? fmaf(lerp, g - m, m) : fmaf(lerp - 1.0f, g - m, g);
    if (frozen) w += step * m / v;
    else {
      v = fmaf(rest2 * g, g, v * beta2);
      w += step * m / (sqrtf(v) / root + eps);
      second[i] = v;
    }
    weight[i] = w, first[i] = m;
    if (has_mask) out[i] = w * (float)mask[i];
  }
}

/* The update of `count` elements from `at` on. */
static void step_of(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t at,
                    int64_t count, const Scalars *s, int edit, int frozen) {
  int coupled = s->coupled != 0.0f, has_mask = mask != NULL;
  float *w = weight + at, *m = first + at, *v = second + at, *o = out + at;
  const float *g = grad + at;
  const uint8_t *part = has_mask ? mask + at : NULL;
  switch (edit << 3 | has_mask << 2 | coupled << 1 | frozen) { /* one loop for each */
#define CASE(E, H, C, F) \
  case E << 3 | H << 2 | C << 1 | F: update(w, g, m, v, o, part, count, s, E, H, C, F); break;
#define CASES(E, H) CASE(E, H, 0, 0) CASE(E, H, 0, 1) CASE(E, H, 1, 0) CASE(E, H, 1, 1)
    CASES(AS_IS, 0) CASES(AS_IS, 1) CASES(DECAYED, 0) CASES(DECAYED, 1) CASES(SCALED, 0) CASES(SCALED, 1)
  }
}

#ifdef V
/* Steps `begin` to `end` as in nm_blocks.c; with a mask it is what is kept, else what V:N:M keeps. There is no soft threshold. */
int nm_adam(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t begin, int64_t end,
            int64_t inner, int64_t gap, const Scalars *s, int edit, int soft, int frozen) {
  (void)soft;
  for (int64_t step = begin; step < end; step++)
    for (int64_t i = 0; i < tiles(inner, gap); i++) {
      Tile t = tile(step, i, inner, gap);
      double total[MOST];
      if (inner <= gap) memset(total, 0, t.length * sizeof *total);
      for (int64_t c = 0, at = t.at; c < t.count; c++, at += t.stride) {
        step_of(weight, grad, first, second, out, mask, at, t.length, s, edit, frozen);
        if (!mask && inner <= gap && (c + 1) % ROWS == 0) /* while they are in the first-level cache */
          add(total, weight + at - (ROWS - 1) * gap, t.length, gap);
      }
      if (mask) continue;
      if (inner > gap) turned(weight + t.at, out + t.at, 0, inner, gap, s->factor);
      else block(weight + t.at, out + t.at, total, t.length, inner, gap, s->factor);
    }
  return 0;
}
#else
/* Rows `begin` to `end` of the weight, M * inner elements each; with a mask it is what is kept, else the N largest of M. */
int nm_adam(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t begin, int64_t end,
            int64_t inner, int64_t gap, const Scalars *s, int edit, int soft, int frozen) {
  (void)gap;
  int64_t row = M * inner, rows = row < PIECE ? PIECE / row : 1;
  const float projected[2] = {s->scale, s->factor};
  for (int64_t r = begin; r < end; r += rows) {
    int64_t last = r + rows < end ? r + rows : end;
    step_of(weight, grad, first, second, out, mask, r * row, (last - r) * row, s, edit, frozen);
    if (!mask) nm_project(weight, out, r * inner, last * inner, inner, soft, projected);
  }
  return 0;
}
#endif
