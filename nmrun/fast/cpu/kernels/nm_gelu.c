/* GELU of float32 or bfloat16, computed in float32, on one thread. Follows nm_numbers.c in one translation unit. Needs AVX-512;
   without it this file is empty. */
#if defined(NUMBERS)

/* 1 / x, off by a few units in the last place; for `low` by 2^-14. */
static inline __attribute__((always_inline)) __m512 inverse(__m512 x, int low) {
  __m512 y = _mm512_rcp14_ps(x);
  return low ? y : _mm512_fmadd_ps(_mm512_fnmadd_ps(x, y, _mm512_set1_ps(1.0f)), y, y);
}

/* x times the normal distribution's function: max(x, 0) less t Phi(-t) with t = |x|. There Phi(-t) is 2^(q(u) - t^2 log2(e) / 2), where q is a
   polynomial in u = 1 / (1 + c t), fitted to be off by 4e-7, for `low` by 3e-4, of Phi up to t = 13.5, behind which all is zero. */
static inline __attribute__((always_inline)) __m512 gelu(__m512 x, int low) {
  static const float q[] = {-1.80512234e-3f, -3.7258753e-3f, -2.86289167e-3f, 1.59014174e-2f, 4.80785867e-2f,
                            0.203123951f,    0.326958675f,   1.82892393f,     -3.4145923f};
  static const float q_low[] = {-6.15273685e-3f, 0.171737845f, 0.229636323f, 1.8721132f, -3.26769495f};
  const __m512 one = _mm512_set1_ps(1.0f), none = _mm512_setzero_ps();
  __m512 t = _mm512_min_ps(_mm512_set1_ps(13.5f), _mm512_abs_ps(x));
  __m512 u = inverse(_mm512_fmadd_ps(t, _mm512_set1_ps(low ? 0.13f : 0.1f), one), low);
  u = _mm512_fmsub_ps(u, _mm512_set1_ps(low ? 3.13960114f : 3.48148148f), _mm512_set1_ps(low ? 2.13960114f : 2.48148148f)); /* from -1 to 1 */
  __m512 p = _mm512_set1_ps(low ? q_low[0] : q[0]);
  for (int i = 1; i < (low ? 5 : 9); i++) p = _mm512_fmadd_ps(p, u, _mm512_set1_ps(low ? q_low[i] : q[i]));
  p = _mm512_fnmadd_ps(_mm512_mul_ps(t, t), _mm512_set1_ps(0.72134752f), p);
  __m512 y = _mm512_fnmadd_ps(t, power(p, low), _mm512_max_ps(none, x));
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

/* x (1 + tanh(a)) / 2 with a = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + exp(-2 a)). */
static inline __attribute__((always_inline)) __m512 gelu_tanh(__m512 x, int low) {
  __m512 a = _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.10294324f), _mm512_set1_ps(2.3022082f))); /* by 2 log2(e) */
  __m512 p = power(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(a)), low); /* exp(-2 |a|) */
  __m512 over = inverse(_mm512_add_ps(p, _mm512_set1_ps(1.0f)), low);
  over = _mm512_mask_mul_ps(over, _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_LT_OQ), over, p);
  return _mm512_mul_ps(x, over);
}

static inline __attribute__((always_inline)) void each(const char *x, char *y, int64_t begin, int64_t end, int tanh, int low) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    __m512 v = number(x, i, LANES, low);
    put(y, i, LANES, low, tanh ? gelu_tanh(v, low) : gelu(v, low));
  }
  if (i < end) {
    __m512 v = number(x, i, end - i, low);
    put(y, i, end - i, low, tanh ? gelu_tanh(v, low) : gelu(v, low));
  }
}

/* GELU of numbers `begin` to `end`; `tanh` is the approximation by it. */
int nm_gelu(const void *x, void *y, int64_t tanh, int64_t low, int64_t begin, int64_t end) {
  if (tanh && low) each(x, y, begin, end, 1, 1);
  else if (tanh) each(x, y, begin, end, 1, 0);
  else if (low) each(x, y, begin, end, 0, 1);
  else each(x, y, begin, end, 0, 0);
  return 0;
}
#endif
