// Vectors of floats or doubles as wide as the CPU has them, functions of them, and what else the kernels share.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define BYTES 64  // of a vector; where the CPU's are shorter, the compiler uses several
enum { ROWS = 12, WIDE = 4 };  // rows of a tile of scores; rows that share the weights of a product
#else
#define BYTES 32
enum { ROWS = 6, WIDE = 3 };
#endif
enum { PANEL = 2, OUTS = 4, KEEP = 64 };  // vectors of words, outputs of a product at a time; most words that are kept
enum { LINE = 64 };  // bytes that are fetched at once

template <typename Real> constexpr Real bits = Real(1.4426950408889634);  // of one e-fold

template <typename Real> struct Of;
template <> struct Of<float> {
    typedef float Vector __attribute__((vector_size(BYTES)));
    typedef float Loose __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef int32_t Mask __attribute__((vector_size(BYTES)));
};
template <> struct Of<double> {
    typedef double Vector __attribute__((vector_size(BYTES)));
    typedef double Loose __attribute__((vector_size(BYTES), aligned(8), may_alias));
    typedef int64_t Mask __attribute__((vector_size(BYTES)));
};
template <typename Real> constexpr int lanes() { return BYTES / sizeof(Real); }

template <typename Real> INLINE typename Of<Real>::Vector load(const Real *from) {
    return *(const typename Of<Real>::Loose *)from;
}

// Stays in a register, where a compiler would rather load it again for every use.
#if defined(__AVX2__)
#define HOLD(v) asm("" : "+x"(v))
#else
#define HOLD(v) (void)(v)
#endif

template <int bytes, typename Real> INLINE Real halves(const Real *v) {  // their sum, half on half
    if constexpr (bytes == sizeof(Real)) {
        return *v;
    } else {
        typedef Real Half __attribute__((vector_size(bytes / 2), aligned(sizeof(Real)), may_alias));
        Half both = *(const Half *)v + *(const Half *)(v + bytes / 2 / sizeof(Real));
        return halves<bytes / 2>((const Real *)&both);
    }
}
template <typename Vector> INLINE auto sum(Vector v) { return halves<BYTES>((decltype(+v[0]) *)&v); }

// Of four vectors at once.
template <typename Vector, typename Real> INLINE void sums(const Vector *v, Real *y) {
    for (int o = 0; o < OUTS; o++) y[o] = sum(v[o]);
}
#if defined(__AVX2__)
INLINE __m256 narrow(Of<float>::Vector v) {
#if defined(__AVX512F__)
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1));
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), high);
#else
    return (__m256)v;
#endif
}
INLINE void sums(const Of<float>::Vector *v, float *y) {
    __m256 a = _mm256_hadd_ps(narrow(v[0]), narrow(v[1])), b = _mm256_hadd_ps(narrow(v[2]), narrow(v[3]));
    a = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
#endif

template <typename Mask> INLINE bool any(Mask v) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
    uint64_t words[BYTES / 8], found = 0;
    memcpy(words, &v, BYTES);
    for (uint64_t word : words) found |= word;
    return found != 0;
#endif
}

// 2^x for x <= 0, to the last bits of a float: a whole power by its exponent, the rest by a polynomial.
INLINE Of<float>::Vector power(Of<float>::Vector x) {
    const float round = 12582912.f;  // 1.5 * 2^23: to add it leaves no room for fractions
    x = x < -126.f ? Of<float>::Vector{} - 126.f : x;
    Of<float>::Vector whole = x + round, f = x - (whole - round);
    Of<float>::Mask n = ((Of<float>::Mask)whole - 0x4B400000) << 23;
    Of<float>::Vector y = f * 1.5403530e-4f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.f;
    y = (Of<float>::Vector)((Of<float>::Mask)y + n);
    return x > -126.f ? y : x == x ? Of<float>::Vector{} : x;
}
INLINE Of<double>::Vector power(Of<double>::Vector x) {
    for (int i = 0; i < lanes<double>(); i++) x[i] = exp2(x[i]);
    return x;
}

// The activations of feed-forwards, by the numbers that native/decode.py gives them.
template <typename Real> INLINE Real activation(Real x, int how) {
    switch (how) {
    case 1: return x > 0 ? x : x != x ? x : Real(0);  // relu
    case 2: return Real(0.5) * x * (1 + Real(erf(x * Real(0.7071067811865476))));  // gelu
    case 3: return Real(0.5) * x * (1 + Real(tanh(Real(0.7978845608028654) * (x + Real(0.044715) * x * x * x))));
    case 4: return x / (1 + Real(exp(-x)));  // silu
    default: return x;
    }
}

// The same for a vector: exponentials of what is not above 0 alone.
INLINE Of<float>::Vector tanh_of(Of<float>::Vector x) {
    Of<float>::Vector e = power(-2 * bits<float> * (x < 0 ? -x : x)), y = (1 - e) / (1 + e);
    return x < 0 ? -y : y;
}
// 1 - erf x for x >= 0, of which e^(-x^2) is known: Abramowitz and Stegun 7.1.26.
INLINE Of<float>::Vector erf_rest(Of<float>::Vector x, Of<float>::Vector e) {
    Of<float>::Vector t = 1 / (1 + 0.3275911f * x), y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    return (y * t + 0.254829592f) * t * e;
}
INLINE Of<float>::Vector activation(Of<float>::Vector x, int how) {
    typedef Of<float>::Vector Vector;
    const Vector zero = {};
    if (how == 3) return 0.5f * x * (1 + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
    if (how == 2) {
        Vector y = erf_rest((x < 0 ? -x : x) * 0.70710678f, power(-0.5f * bits<float> * x * x));
        return 0.5f * x * (x < 0 ? y : 2 - y);
    }
    if (how == 4) {
        Vector e = power(-bits<float> * (x < 0 ? -x : x));
        return x / (1 + e) * (x < 0 ? e : zero + 1);
    }
    return how == 1 ? (x < 0 ? zero : x) : x;
}
INLINE void bends(const float *x, float *y, long many, int how) {
    long i = 0;
    for (; i + lanes<float>() <= many; i += lanes<float>()) *(Of<float>::Loose *)(y + i) = activation(load(x + i), how);
    for (; i < many; i++) y[i] = activation(x[i], how);
}
INLINE void bends(const double *x, double *y, long many, int how) {
    for (long i = 0; i < many; i++) y[i] = activation(x[i], how);
}

INLINE long up(long many, long step) { return (many + step - 1) / step * step; }

template <typename Real> INLINE void put(Real *to, typename Of<Real>::Vector v) { *(typename Of<Real>::Loose *)to = v; }

// y (8 channels, 8 rows) = x (8 rows, 8 channels) turned.
template <typename Real> INLINE void turned8(const Real *x, long step, Real *y, long line) {
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++) y[c * line + r] = x[r * step + c];
}
#if defined(__AVX2__)
INLINE void turned8(const float *x, long step, float *y, long line) {
    __m256 a[8], b[8];
    for (int r = 0; r < 8; r++) a[r] = _mm256_loadu_ps(x + r * step);
    for (int r = 0; r < 8; r += 2)
        b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]), b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
    for (int r = 0; r < 8; r += 4)
        for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = _mm256_shuffle_ps(b[r + i], b[r + i + 2], 0x44);
            a[r + 2 * i + 1] = _mm256_shuffle_ps(b[r + i], b[r + i + 2], 0xEE);
        }
    for (int r = 0; r < 4; r++) {
        _mm256_storeu_ps(y + r * line, _mm256_permute2f128_ps(a[r], a[r + 4], 0x20));
        _mm256_storeu_ps(y + (r + 4) * line, _mm256_permute2f128_ps(a[r], a[r + 4], 0x31));
    }
}
#endif

// A tile of a product, in registers: found[r][j] = sum over k of x[r, k] p[k, j], for ROWS rows of x and a panel p.
// Rows lie `step` apart, and those at `next` are fetched meanwhile; or, ACROSS, side by side for every k, and a step is
// from k to k.
template <typename Real, bool ACROSS> INLINE void tile(const Real *x, long step, const Real *panel, long deep,
                                                       typename Of<Real>::Vector (*found)[PANEL],
                                                       const Real *next = 0) {
    typedef typename Of<Real>::Vector Vector;
    const int lane = lanes<Real>(), line = LINE / sizeof(Real);
    Vector s[ROWS][PANEL] = {};
    const Real *rows[ROWS];
    for (int r = 0; !ACROSS && r < ROWS; r++) rows[r] = x + r * step;
    const auto one_more = [&](long k) __attribute__((always_inline)) {
        Vector one = load(panel + k * PANEL * lane), two = load(panel + k * PANEL * lane + lane);
        HOLD(one);
        HOLD(two);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Real u = ACROSS ? x[r] : rows[r][k];
            s[r][0] += u * one, s[r][1] += u * two;
        }
        if (ACROSS) x += step;
    };
    long k = 0;
    for (; !ACROSS && next && k + line <= deep; k += line) {
        for (int r = 0; r < ROWS; r++) __builtin_prefetch(next + r * step + k);
#pragma GCC unroll 4
        for (int i = 0; i < line; i++) one_more(k + i);
    }
#pragma GCC unroll 4
    for (; k < deep; k++) one_more(k);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < PANEL; j++) found[r][j] = s[r][j];
}

// The activation of x, and what it does to a small change of x.
template <typename Real> struct Activation {
    Real value, slope;
};
INLINE Activation<double> activated(double x, int how) {
    switch (how) {
    case 1: return {activation(x, how), x > 0 ? 1. : 0.};
    case 2: {
        double half = 0.5 * (1 + erf(x * 0.7071067811865476));
        return {x * half, half + x * 0.3989422804014327 * exp(-x * x / 2)};
    }
    case 3: {
        const double c = 0.7978845608028654, cube = 0.044715;
        double t = tanh(c * (x + cube * x * x * x)), half = 0.5 * (1 + t);
        return {x * half, half + 0.5 * x * (1 - t * t) * c * (1 + 3 * cube * x * x)};
    }
    case 4: {
        double s = 1 / (1 + exp(-x));
        return {x * s, s * (1 + x * (1 - s))};
    }
    default: return {x, 1.};
    }
}
INLINE Activation<Of<float>::Vector> activated(Of<float>::Vector x, int how) {
    typedef Of<float>::Vector Vector;
    const Vector zero = {};
    if (how == 2) {
        Vector size = x < 0 ? -x : x, e = power(-0.5f * bits<float> * x * x),
               half = 0.5f * erf_rest(size * 0.70710678f, e);
        half = x < 0 ? half : 1 - half;
        return {x * half, half + x * 0.39894228f * e};
    }
    if (how == 3) {
        Vector t = tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)), half = 0.5f * (1 + t);
        return {x * half, half + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 0.134145f * x * x)};
    }
    if (how == 4) {
        Vector e = power(-bits<float> * (x < 0 ? -x : x)), s = (x < 0 ? e : zero + 1) / (1 + e);
        return {x * s, s * (1 + x * (1 - s))};
    }
    return how == 1 ? Activation<Vector>{x < 0 ? zero : x, x > 0 ? zero + 1 : zero} : Activation<Vector>{x, zero + 1};
}

// d = d times the slope at x, and y = the activation of x.
INLINE void activation_backward(const float *x, float *y, float *d, long many, int how) {
    const long lane = lanes<float>(), whole = many / lane * lane;
    for (long i = 0; i < whole; i += lane) {
        const auto one = activated(load(x + i), how);
        put(d + i, load(d + i) * one.slope), put(y + i, one.value);
    }
    for (long i = whole; i < many; i++) {
        const auto one = activated((double)x[i], how);
        d[i] *= (float)one.slope, y[i] = (float)one.value;
    }
}
INLINE void activation_backward(const double *x, double *y, double *d, long many, int how) {
    for (long i = 0; i < many; i++) {
        const auto one = activated(x[i], how);
        d[i] *= one.slope, y[i] = one.value;
    }
}

// Which share of the work a core has: the same for all that is done in one go.
struct Share {
    long which, all;
    long begin(long many) const { return many * which / all; }
    long end(long many) const { return many * (which + 1) / all; }
};
template <typename Work> INLINE void spread(int threads, Work work) {
#pragma omp parallel num_threads(threads) if (threads > 1)
#ifdef _OPENMP
    work(Share{omp_get_thread_num(), omp_get_num_threads()});
#else
    work(Share{0, 1});
#endif
}
INLINE void wait(Share own) {  // for the others
    if (own.all > 1) {
#pragma omp barrier
    }
}
