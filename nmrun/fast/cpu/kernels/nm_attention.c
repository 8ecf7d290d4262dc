/* Attention of one query's heads after another, on one thread. Follows nm_vectors.c and nm_numbers.c in one translation unit. Needs AVX-512; without it this
   file is empty.

   A head's keys and values are laid out once: panels of PANEL columns, keys turned so that the keys lie in the lanes, values as they are.
   Then both products are one kernel, a (rows, words) times b (words, PANEL). A word is a float32 number, or two of bfloat16 that one
   instruction multiplies and adds up in float32. QUERIES queries at a time have their scores of all keys in memory, and the softmax is taken
   of whole rows, in float32; its division comes last. So a query has the same bits in whatever company it comes. */
#if defined(NUMBERS)

#define WIDE 4 /* vectors */
#define PANEL (WIDE * LANES)
#define DEEP 6 /* rows at once */
#define QUERIES (4 * DEEP)

/* What is attended to, as nmrun/fast/fused.py fills it: tensors (batch, heads, tokens, width), of which the numbers of a token lie side by
   side; how far apart batches, heads and tokens are, in numbers. The mask, (batch, heads, queries, keys) or NULL, is added to the scores. The
   result is (batch, queries, heads, width). `low`: the tensors are bfloat16, not float32. `short_words`: products are of bfloat16. */
typedef struct {
  const char *q, *k, *v;
  const float *mask;
  char *out;
  int64_t heads, queries, keys, width, values;
  int64_t q_apart[3], k_apart[3], v_apart[3], mask_apart[3];
  int64_t low, short_words;
  double scale;
} Attention;

static inline __m512 fused(__m512 sum, __m512i a, __m512i b, int two) {
#if defined(__AVX512BF16__)
  if (two) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
  return _mm512_fmadd_ps((__m512)a, (__m512)b, sum);
}

/* A token's numbers as words, zeros behind up to `words`, a multiple of LANES. */
static inline void row(const char *from, int64_t at, int64_t count, int low, uint32_t *to, int64_t words, int two) {
  for (int64_t w = 0; w < words; w += LANES)
    if (two)
      for (int h = 0; h < 2; h++) {
        int64_t c = 2 * w + LANES * h;
        _mm256_store_si256((__m256i *)(to + w) + h, rounded(number(from, at + c, count - c, low)));
      }
    else _mm512_store_ps(to + w, number(from, at + w, count - w, low));
}

/* The keys of a head: word w of key j at to[(j / PANEL * words + w) * PANEL + j % PANEL]. `line` has room for LANES of them. */
static inline void lay_keys(const Attention *of, int64_t at, int64_t words, uint32_t *line, uint32_t *to, int two) {
  for (int64_t j = 0; j < up(of->keys, PANEL); j += LANES) {
    for (int l = 0; l < LANES; l++)
      row(of->k, at + (j + l) * of->k_apart[2], j + l < of->keys ? of->width : 0, (int)of->low, line + l * words, words, two);
    for (int64_t w = 0; w < words; w += LANES) {
      vec block[LANES];
      for (int l = 0; l < LANES; l++) block[l] = (vec)_mm512_load_si512(line + l * words + w);
      turn(block);
      for (int l = 0; l < LANES; l++) _mm512_store_si512(to + (j / PANEL * words + w + l) * PANEL + j % PANEL, (__m512i)block[l]);
    }
  }
}

/* The values of a head: number c of key j, or with words of two of keys 2j and 2j + 1, at to[(c / PANEL * words + j) * PANEL + c % PANEL]. */
static inline void lay_values(const Attention *of, int64_t at, int64_t words, uint32_t *to, int two) {
  for (int64_t j = 0; j < words; j++)
    for (int64_t c = 0; c < up(of->values, PANEL); c += LANES) {
      __m512i word = _mm512_setzero_si512();
      for (int h = 0; h < 1 + two; h++) {
        int64_t key = (1 + two) * j + h;
        __m512 v = number(of->v, at + key * of->v_apart[2] + c, key < of->keys ? of->values - c : 0, (int)of->low);
        if (!two) word = (__m512i)v;
        else word = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(v)), 16 * h));
      }
      _mm512_store_si512(to + (c / PANEL * words + j) * PANEL + c % PANEL, word);
    }
}

/* c (DEEP, PANEL) = a (DEEP, words) times b (words, PANEL); rows of a and c are so many words apart. */
static inline __attribute__((always_inline)) void multiply(const uint32_t *a, int64_t a_apart, const uint32_t *b, int64_t words, float *c,
                                                           int64_t c_apart, int two) {
  __m512 sum[DEEP][WIDE];
#pragma GCC unroll 6
  for (int r = 0; r < DEEP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < WIDE; i++) sum[r][i] = _mm512_setzero_ps();
  for (int64_t w = 0; w < words; w++, b += PANEL) {
    __m512i column[WIDE];
#pragma GCC unroll 4
    for (int i = 0; i < WIDE; i++) column[i] = _mm512_load_si512(b + i * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < DEEP; r++) {
      __m512i one = _mm512_set1_epi32((int)a[r * a_apart + w]);
#pragma GCC unroll 4
      for (int i = 0; i < WIDE; i++) sum[r][i] = fused(sum[r][i], one, column[i], two);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < DEEP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < WIDE; i++) _mm512_store_ps(c + r * c_apart + i * LANES, sum[r][i]);
}

/* Softmax of a row of scores, in place, without the division: of the first `count` keys, zeros up to `keys`, a multiple of PANEL; with `two` as
   numbers of bfloat16. Returns what is to be divided by. */
static inline float softmax(float *scores, const float *mask, int64_t count, int64_t keys, float scale, int two) {
  const __m512 least = _mm512_set1_ps(-INFINITY), log2e = _mm512_set1_ps(1.44269504f), by = _mm512_set1_ps(scale);
  __m512 most = least, sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < keys; j += LANES) {
    __mmask16 keep = first_of(count - j);
    __m512 s = _mm512_mul_ps(_mm512_load_ps(scores + j), by);
    if (mask != NULL) s = _mm512_add_ps(s, _mm512_maskz_loadu_ps(keep, mask + j));
    s = _mm512_mask_mov_ps(least, keep, s);
    _mm512_store_ps(scores + j, s);
    most = _mm512_max_ps(most, s);
  }
  float top = _mm512_reduce_max_ps(most);
  if (top == -INFINITY) top = 0.0f; /* nothing is seen: all are zero */
  for (int64_t j = 0; j < keys; j += LANES) {
    __m512 p = power(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + j), _mm512_set1_ps(top)), log2e), two);
    sum = _mm512_add_ps(sum, p);
    if (two) _mm256_store_si256((__m256i *)((uint16_t *)scores + j), rounded(p));
    else _mm512_store_ps(scores + j, p);
  }
  return _mm512_reduce_add_ps(sum);
}

static inline __attribute__((always_inline)) int attend(const Attention *of, int64_t begin, int64_t end, int two) {
  int64_t words = up((of->width + two) / (1 + two), LANES), keys = up(of->keys, PANEL), pairs = keys / (1 + two), wide = up(of->values, PANEL);
  float *memory = scratch(keys * words + pairs * wide + LANES * words + QUERIES * (words + keys + wide));
  if (memory == NULL) return 1;
  uint32_t *k = (uint32_t *)memory, *v = k + keys * words, *line = v + pairs * wide, *q = line + LANES * words;
  float *scores = (float *)(q + QUERIES * words), *sums = scores + QUERIES * keys;
  for (int64_t i = begin; i < end; i++) {
    int64_t b = i / of->heads, h = i % of->heads;
    lay_keys(of, b * of->k_apart[0] + h * of->k_apart[1], words, line, k, two);
    lay_values(of, b * of->v_apart[0] + h * of->v_apart[1], pairs, v, two);
    for (int64_t t = 0; t < of->queries; t += QUERIES) {
      int64_t count = of->queries - t < QUERIES ? of->queries - t : QUERIES;
      float over[QUERIES];
      for (int64_t r = 0; r < up(count, DEEP); r++)
        row(of->q, b * of->q_apart[0] + h * of->q_apart[1] + (t + r) * of->q_apart[2], r < count ? of->width : 0, (int)of->low, q + r * words,
            words, two);
      for (int64_t j = 0; j < keys; j += PANEL)
        for (int64_t r = 0; r < count; r += DEEP) multiply(q + r * words, words, k + j * words, words, scores + r * keys + j, keys, two);
      for (int64_t r = 0; r < count; r++) {
        const float *mask = of->mask;
        if (mask != NULL) mask += b * of->mask_apart[0] + h * of->mask_apart[1] + (t + r) * of->mask_apart[2];
        over[r] = softmax(scores + r * keys, mask, of->keys, keys, (float)of->scale, two);
      }
      for (int64_t c = 0; c < wide; c += PANEL)
        for (int64_t r = 0; r < count; r += DEEP)
          multiply((uint32_t *)scores + r * keys, keys, v + c * pairs, pairs, sums + r * wide + c, wide, two);
      for (int64_t r = 0; r < count; r++) {
        __m512 inverse = _mm512_set1_ps(over[r] == 0.0f ? 0.0f : 1.0f / over[r]);
        int64_t at = ((b * of->queries + t + r) * of->heads + h) * of->values;
        for (int64_t c = 0; c < of->values; c += LANES)
          put(of->out, at + c, of->values - c, (int)of->low, _mm512_mul_ps(_mm512_load_ps(sums + r * wide + c), inverse));
      }
    }
  }
  return 0;
}

/* Heads `begin` to `end` of all batches. Returns 0, or 1 without memory. */
int nm_attention(const Attention *of, int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
  if (of->short_words) return attend(of, begin, end, 1);
#endif
  return attend(of, begin, end, 0);
}
#endif
