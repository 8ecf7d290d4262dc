/* One step of Adam over a float32 weight, with what a recipe does around it: it edits the gradient, and the updated weight is projected
   while it is in the cache. Follows nm_project.c in one translation unit.

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

/* Rows `begin` to `end` of the weight, M * inner elements each; with a mask it is what is kept, else the N largest of M. */
int nm_adam(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t begin, int64_t end,
             int64_t inner, const Scalars *s, int edit, int soft, int frozen) {
  int64_t row = M * inner, rows = row < PIECE ? PIECE / row : 1;
  int coupled = s->coupled != 0.0f, has_mask = mask != NULL;
  const float projected[2] = {s->scale, s->factor};
  for (int64_t r = begin; r < end; r += rows) {
    int64_t last = r + rows < end ? r + rows : end, at = r * row, count = (last - r) * row;
    float *w = weight + at, *m = first + at, *v = second + at, *o = out + at;
    const float *g = grad + at;
    const uint8_t *part = has_mask ? mask + at : NULL;
    switch (edit << 3 | has_mask << 2 | coupled << 1 | frozen) { /* one loop for each */
#define CASE(E, H, C, F) \
  case E << 3 | H << 2 | C << 1 | F: update(w, g, m, v, o, part, count, s, E, H, C, F); break;
#define CASES(E, H) CASE(E, H, 0, 0) CASE(E, H, 0, 1) CASE(E, H, 1, 0) CASE(E, H, 1, 1)
      CASES(AS_IS, 0) CASES(AS_IS, 1) CASES(DECAYED, 0) CASES(DECAYED, 1) CASES(SCALED, 0) CASES(SCALED, 1)
    }
    if (!has_mask) nm_project(weight, out, r * inner, last * inner, inner, soft, projected);
  }
  return 0;
}
