/* Numbers of float32 or bfloat16 as 16 lanes of float32. Follows nm_vectors.c in one translation unit. Needs AVX-512, which NUMBERS says. */
#include <math.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define NUMBERS
#include <immintrin.h>

static inline int64_t up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

static inline __mmask16 first_of(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

static inline __m512 number(const char *from, int64_t at, int64_t count, int low) { /* the first `count` of 16 from `at` on, zeros behind */
  __mmask16 keep = first_of(count);
  if (!low) return _mm512_maskz_loadu_ps(keep, (const float *)from + at);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(keep, (const uint16_t *)from + at)), 16);
}

static inline __m256i rounded(__m512 v) { /* to bfloat16, ties to even; a NaN stays one */
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  return (__m256i)narrowed((vec)v);
#endif
}

static inline void put(char *to, int64_t at, int64_t count, int low, __m512 v) { /* the first `count` of 16, from `at` on */
  __mmask16 keep = first_of(count);
  if (low) _mm256_mask_storeu_epi16((uint16_t *)to + at, keep, rounded(v));
  else _mm512_mask_storeu_ps((float *)to + at, keep, v);
}

/* 2^x for x of at most 0: zero below -126, NaN for NaN. */
static inline __attribute__((always_inline)) __m512 power(__m512 x, int two) {
  __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n), p;
  __mmask16 least = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
#define NEXT(C) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(C))
  if (two) p = _mm512_set1_ps(9.6181291e-3f); /* ln(2)^i / i!, as far as bfloat16 needs it */
  else {
    p = _mm512_set1_ps(1.5403530e-4f);
    NEXT(1.3333558e-3f);
    NEXT(9.6181291e-3f);
  }
  NEXT(5.5504109e-2f);
  NEXT(2.4022651e-1f);
  NEXT(6.9314718e-1f);
  NEXT(1.0f);
#undef NEXT
  return _mm512_maskz_scalef_ps(least, p, n);
}
#endif
