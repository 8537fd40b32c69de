// What learning on a CPU spends its time on besides large products: attention and its gradient, whose weights
// never leave the cache, the activations of feed-forwards, dropout, and the powers of a softmax over many words.
// Compiled with decode.cpp and called by native/train.py; everything here is also computed by torch where there is no
// compiler, and tested against that. Memory is the caller's; nothing is allocated, nothing is kept.

#include "vector.h"

enum { GROUP = 4, MOST = 3, SIDE = 2 };  // rows of a product; vectors beside each other, of queries and of channels

// found[r][j] = sum over k of x[k, r] p[k, j]: GROUP rows and N vectors, for x with steps of its own.
template <typename Real, int N> INLINE void product(const Real *x, long deep, long beside, const Real *p, long step,
                                                    long many, typename Of<Real>::Vector (*found)[N]) {
    typedef typename Of<Real>::Vector Vector;
    Vector s[GROUP][N] = {};
    for (long k = 0; k < many; k++) {
        Vector v[N];
        for (int j = 0; j < N; j++) {
            v[j] = load(p + k * step + j * lanes<Real>());
            HOLD(v[j]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < GROUP; r++) {
            Real u = x[k * deep + r * beside];
            for (int j = 0; j < N; j++) s[r][j] += u * v[j];
        }
    }
    for (int r = 0; r < GROUP; r++)
        for (int j = 0; j < N; j++) found[r][j] = s[r][j];
}

template <typename Real> INLINE Real inner(const Real *x, const Real *y, long many) {
    const long lane = lanes<Real>(), whole = many / lane * lane;
    typename Of<Real>::Vector s = {};
    for (long i = 0; i < whole; i += lane) s += load(x + i) * load(y + i);
    Real total = sum(s);
    for (long i = whole; i < many; i++) total += x[i] * y[i];
    return total;
}

#if defined(__AVX2__)
// y (8 rows, 4 channels) = x (4 channels, 8 rows) turned.
INLINE void turned4(const float *x, long step, float *y, long next) {
    __m256 a = _mm256_loadu_ps(x), b = _mm256_loadu_ps(x + step), c = _mm256_loadu_ps(x + 2 * step);
    __m256 d = _mm256_loadu_ps(x + 3 * step), low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    __m256 low2 = _mm256_unpacklo_ps(c, d), high2 = _mm256_unpackhi_ps(c, d);
    __m256 all[4] = {_mm256_shuffle_ps(low, low2, 0x44), _mm256_shuffle_ps(low, low2, 0xEE),
                     _mm256_shuffle_ps(high, high2, 0x44), _mm256_shuffle_ps(high, high2, 0xEE)};
    for (int i = 0; i < 4; i++) {
        _mm_storeu_ps(y + i * next, _mm256_castps256_ps128(all[i]));
        _mm_storeu_ps(y + (i + 4) * next, _mm256_extractf128_ps(all[i], 1));
    }
}
#else
INLINE void turned4(const float *x, long step, float *y, long next) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < 8; i++) y[i * next + r] = x[r * step + i];
}
#endif
INLINE void turned4(const double *x, long step, double *y, long next) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < 8; i++) y[i * next + r] = x[r * step + i];
}

// y (wide, line) = x (rows, wide), plus a row, turned, times a factor, with zeros behind the last row.
template <typename Real>
static void turned(const Real *x, long step, const Real *add, long rows, long wide, Real *y, long line, Real factor) {
    const long whole = rows / 8 * 8, channels = wide / 8 * 8;
    for (long r = 0; r < whole; r += 8)
        for (long c = 0; c < channels; c += 8) turned8(x + r * step + c, step, y + c * line + r, line);
    for (long c = 0; c < wide; c++) {
        for (long r = c < channels ? whole : 0; r < rows; r++) y[c * line + r] = x[r * step + c];
        for (long r = rows; r < line; r++) y[c * line + r] = 0;
        const Real more = add ? add[c] : 0;
        for (long r = 0; (add || factor != 1) && r < rows; r++) y[c * line + r] = (y[c * line + r] + more) * factor;
    }
}

// y (all, line) = x (rows, wide), plus a row, with zeros behind the last channel and the last row.
template <typename Real>
static void padded(const Real *x, long step, const Real *add, long rows, long wide, Real *y, long line, long all) {
    const long lane = lanes<Real>(), whole = wide / lane * lane;
    for (long r = 0; r < rows; r++) {
        for (long c = 0; c < whole; c += lane) {
            const typename Of<Real>::Vector one = load(x + r * step + c);
            put(y + r * line + c, add ? one + load(add + c) : one);
        }
        for (long c = whole; c < line; c++) y[r * line + c] = c < wide ? x[r * step + c] + (add ? add[c] : 0) : 0;
    }
    for (long i = rows * line; i < all * line; i++) y[i] = 0;
}

// o_i = sum over j of softmax_j(scale q_i . k_j + bias_ij) v_j, and back. Weights are held for a few queries at a time,
// with queries side by side, so that all that is done to them is done to whole vectors.
template <typename Real> struct TrainAttentionArgs {
    const Real *q, *k, *v;
    const void *added;  // what is added to scores, or a byte for each that tells whether it counts
    Real *y, *mass;  // (batch, queries, heads, dim); (batch, heads, 2, queries) the largest score and 1 / the sum
    const Real *dy;  // what comes back for y, which lies as y does
    Real *dq, *dk, *dv;  // as y; (batch, keys, groups, dim)
    Real *room;
    int64_t batch, heads, groups, queries, keys, dim, causal, hides, room_step, threads;
    int64_t q_step[3], k_step[3], v_step[3], added_step[4];  // batch, head, place, and key
    double scale;  // of q . k
    const Real *q_add, *k_add, *v_add;  // (heads or groups, dim): to all of them
};

// All that is laid out anew for one head.
template <typename Real> struct Head {
    Real *queries, *ups;  // (dim, places)
    Real *weights, *slopes;  // (keys, some queries)
    Real *q, *k, *v, *dy;  // (places, wide)
    Real *dk, *dv, *share;  // (keys, wide); of each query
    long line, stretch, wide;  // places of queries and of keys, channels

    long needs;  // numbers in all

    Head(const TrainAttentionArgs<Real> &a, Real *room) {
        const long lane = lanes<Real>();
        line = up(a.queries, lane), stretch = up(a.keys, GROUP), wide = up(a.dim, SIDE * lane), needs = 0;
        const auto take = [&](long many) {
            Real *there = room ? room + needs : room;
            needs += up(many, lane);
            return there;
        };
        queries = take(a.dim * line), ups = take(a.dim * line), share = take(line);
        weights = take(stretch * MOST * lane), slopes = take(stretch * MOST * lane);
        q = take(a.queries * wide), dy = take(a.queries * wide), k = take(stretch * wide), v = take(stretch * wide);
        dk = take(stretch * wide), dv = take(stretch * wide);
    }
};

template <typename Real> INLINE const Real *at(const Real *x, const int64_t *step, long b, long h) {
    return x + b * step[0] + h * step[1];
}

template <typename Real> INLINE const Real *of(const Real *add, long head, long dim) {
    return add ? add + head * dim : 0;
}

// Scores of N vectors of queries from `first` on with keys up to `many`, in bits -> weights, not yet normed.
template <typename Real, int N>
static void scores(const TrainAttentionArgs<Real> &a, const Head<Real> &head, long b, long h, long first, long many) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>(), width = N * lane, size = a.hides ? 1 : sizeof(Real);
    const Real none = -INFINITY;
    const char *added = (const char *)a.added;
    if (added) added += (b * a.added_step[0] + h * a.added_step[1]) * size;
    for (long j = 0; j < many; j += GROUP) {
        Vector found[GROUP][N];
        product<Real, N>(head.k + j * head.wide, 1, head.wide, head.queries + first, head.line, a.dim, found);
        for (int r = 0; r < GROUP; r++)
            for (int n = 0; n < N; n++) put(head.weights + (j + r) * width + n * lane, found[r][n]);
    }
    for (long i = many * width; i < up(many, GROUP) * width; i++) head.weights[i] = none;
    const long last = a.queries - first < width ? a.queries - first : width, next = a.added_step[2] * size;
    for (long j = 0; added && j < many; j++) {
        Real *to = head.weights + j * width;
        const char *one = added + j * a.added_step[3] * size + first * next;
        if (a.hides && !next) {
            for (int n = 0; !*one && n < N; n++) put(to + n * lane, Vector{} + none);
        } else if (a.hides) {
            for (long i = 0; i < last; i++) to[i] = one[i * next] ? to[i] : none;
        } else {
            for (long i = 0; i < last; i++) to[i] += *(const Real *)(one + i * next) * bits<Real>;
        }
    }
    for (long j = first + 1; a.causal && j < many; j++)
        for (long i = 0; i < width && i < j - first; i++) head.weights[j * width + i] = none;
}

// Keys that some of these queries may see.
template <typename Real> INLINE long seen(const TrainAttentionArgs<Real> &a, long first, long width) {
    return a.causal && first + width < a.keys ? first + width : a.keys;
}

// A product whose result is turned back: y[i, d] = found[d, i] times a factor of i.
template <typename Real, int N> INLINE void back(const Real *x, long step, long dim, const Real *p, long many,
                                                 long rows, const Real *factor, Real *y, long next) {
    const long lane = lanes<Real>();
    for (long d = 0; d < dim; d += GROUP) {
        typename Of<Real>::Vector found[GROUP][N];
        product<Real, N>(x + d, step, 1, p, N * lane, many, found);
        for (int r = 0; factor && r < GROUP; r++)
            for (int n = 0; n < N; n++) found[r][n] *= load(factor + n * lane);
        const Real *one = (const Real *)found;
        const long some = dim - d < GROUP ? dim - d : GROUP, whole = some == GROUP ? rows / 8 * 8 : 0;
        for (long i = 0; i < whole; i += 8) turned4(one + i, N * lane, y + i * next + d, next);
        for (long i = whole; i < rows; i++)
            for (long r = 0; r < some; r++) y[i * next + d + r] = one[r * N * lane + i];
    }
}

template <typename Real, int N>
static void some_forth(const TrainAttentionArgs<Real> &a, const Head<Real> &head, long b, long h, long first) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>(), width = N * lane, many = seen(a, first, width);
    scores<Real, N>(a, head, b, h, first, many);
    Vector most[N], mass[N];
    for (int n = 0; n < N; n++) {
        most[n] = Vector{} - INFINITY, mass[n] = Vector{};
        for (long j = 0; j < many; j++) {
            Vector one = load(head.weights + j * width + n * lane);
            most[n] = one > most[n] ? one : most[n];
        }
        Vector high = most[n] > -INFINITY ? most[n] : Vector{};
        for (long j = 0; j < many; j++) {
            Vector one = power(load(head.weights + j * width + n * lane) - high);
            put(head.weights + j * width + n * lane, one);
            mass[n] += one;
        }
        most[n] = high;
    }
    const long rows = a.queries - first < width ? a.queries - first : width;
    Real *kept = a.mass + (b * a.heads + h) * 2 * a.queries + first;
    Real factor[MOST * BYTES / sizeof(Real)], high[MOST * BYTES / sizeof(Real)];
    for (int n = 0; n < N; n++) {
        put(factor + n * lane, mass[n] == 0 ? Vector{} : 1 / mass[n]);  // nothing, where there is nothing to see
        put(high + n * lane, most[n]);
    }
    memcpy(kept, high, rows * sizeof(Real)), memcpy(kept + a.queries, factor, rows * sizeof(Real));
    const long next = a.heads * a.dim;
    back<Real, N>(head.v, head.wide, a.dim, head.weights, many, rows, factor,
                  a.y + ((b * a.queries + first) * a.heads + h) * a.dim, next);
}

// to[j, d] += sum over queries i of weights[j, i] x[i, d]
template <typename Real> INLINE void gather(const Real *weights, long width, long many, const Real *x, long step,
                                            long rows, Real *to, long wide) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>();
    for (long j = 0; j < many; j += GROUP)
        for (long d = 0; d < wide; d += SIDE * lane) {
            Vector found[GROUP][SIDE];
            product<Real, SIDE>(weights + j * width, 1, width, x + d, step, rows, found);
            for (int r = 0; r < GROUP; r++)
                for (int n = 0; n < SIDE; n++) {
                    Real *one = to + (j + r) * wide + d + n * lane;
                    put(one, load(one) + found[r][n]);
                }
        }
}

template <typename Real, int N>
static void some_back(const TrainAttentionArgs<Real> &a, const Head<Real> &head, long b, long h, long first) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>(), width = N * lane, many = seen(a, first, width), full = up(many, GROUP);
    const long rows = a.queries - first < width ? a.queries - first : width;
    scores<Real, N>(a, head, b, h, first, many);
    const Real *kept = a.mass + (b * a.heads + h) * 2 * a.queries + first;
    Real high[MOST * BYTES / sizeof(Real)] = {}, factor[MOST * BYTES / sizeof(Real)] = {};
    memcpy(high, kept, rows * sizeof(Real)), memcpy(factor, kept + a.queries, rows * sizeof(Real));
    for (long j = 0; j < full; j += GROUP) {
        Vector found[GROUP][N];
        product<Real, N>(head.v + j * head.wide, 1, head.wide, head.ups + first, head.line, a.dim, found);
        for (int r = 0; r < GROUP; r++)
            for (int n = 0; n < N; n++) {
                Real *one = head.weights + (j + r) * width + n * lane;
                Vector weight = power(load(one) - load(high + n * lane)) * load(factor + n * lane);
                put(one, weight);
                put(head.slopes + (j + r) * width + n * lane,
                    weight * (found[r][n] - load(head.share + first + n * lane)));
            }
    }
    const long next = a.heads * a.dim, from = ((b * a.queries + first) * a.heads + h) * a.dim;
    for (long i = 0; i < width; i++) factor[i] = Real(a.scale);
    back<Real, N>(head.k, head.wide, a.dim, head.slopes, many, rows, factor, a.dq + from, next);
    gather(head.slopes, width, full, head.q + first * head.wide, head.wide, rows, head.dk, head.wide);
    gather(head.weights, width, full, head.dy + first * head.wide, head.wide, rows, head.dv, head.wide);
}

// Vectors of queries that are taken next: not one alone, which is slow, if it can be helped.
INLINE int beside(long left, long lane) {
    const long vectors = (left + lane - 1) / lane;
    return vectors == 4 ? 2 : vectors < MOST ? vectors : MOST;
}

template <typename Real> static void forward(const TrainAttentionArgs<Real> &a, long b, long group, Real *room) {
    const long share = a.heads / a.groups, lane = lanes<Real>();
    Head<Real> head(a, room);
    padded(at(a.k, a.k_step, b, group), a.k_step[2], of(a.k_add, group, a.dim), a.keys, a.dim, head.k, head.wide,
           head.stretch);
    padded(at(a.v, a.v_step, b, group), a.v_step[2], of(a.v_add, group, a.dim), a.keys, a.dim, head.v, head.wide,
           head.stretch);
    for (long h = group * share; h < (group + 1) * share; h++) {
        turned(at(a.q, a.q_step, b, h), a.q_step[2], of(a.q_add, h, a.dim), a.queries, a.dim, head.queries, head.line,
               bits<Real> * Real(a.scale));
        for (long first = 0; first < a.queries;) {
            const int some = beside(a.queries - first, lane);
            (some == 1   ? some_forth<Real, 1>
             : some == 2 ? some_forth<Real, 2>
                         : some_forth<Real, 3>)(a, head, b, h, first);
            first += some * lane;
        }
    }
}

template <typename Real> static void backward(const TrainAttentionArgs<Real> &a, long b, long group, Real *room) {
    const long share = a.heads / a.groups, lane = lanes<Real>(), next = a.heads * a.dim;
    Head<Real> head(a, room);
    padded(at(a.k, a.k_step, b, group), a.k_step[2], of(a.k_add, group, a.dim), a.keys, a.dim, head.k, head.wide,
           head.stretch);
    padded(at(a.v, a.v_step, b, group), a.v_step[2], of(a.v_add, group, a.dim), a.keys, a.dim, head.v, head.wide,
           head.stretch);
    memset(head.dk, 0, head.stretch * head.wide * sizeof(Real));
    memset(head.dv, 0, head.stretch * head.wide * sizeof(Real));
    for (long h = group * share; h < (group + 1) * share; h++) {
        const long from = (b * a.queries * a.heads + h) * a.dim;
        const Real *q = at(a.q, a.q_step, b, h), *add = of(a.q_add, h, a.dim), *none = 0;
        turned(q, a.q_step[2], add, a.queries, a.dim, head.queries, head.line, bits<Real> * Real(a.scale));
        turned(a.dy + from, next, none, a.queries, a.dim, head.ups, head.line, Real(1));
        padded(q, a.q_step[2], add, a.queries, a.dim, head.q, head.wide, a.queries);
        for (long i = 0; a.scale != 1 && i < a.queries * head.wide; i++) head.q[i] *= Real(a.scale);
        padded(a.dy + from, next, none, a.queries, a.dim, head.dy, head.wide, a.queries);
        for (long i = 0; i < head.line; i++)
            head.share[i] = i < a.queries ? inner(a.dy + from + i * next, a.y + from + i * next, a.dim) : 0;
        for (long first = 0; first < a.queries;) {
            const int some = beside(a.queries - first, lane);
            (some == 1   ? some_back<Real, 1>
             : some == 2 ? some_back<Real, 2>
                         : some_back<Real, 3>)(a, head, b, h, first);
            first += some * lane;
        }
    }
    for (long j = 0; j < a.keys; j++) {
        const long to = ((b * a.keys + j) * a.groups + group) * a.dim;
        memcpy(a.dk + to, head.dk + j * head.wide, a.dim * sizeof(Real));
        memcpy(a.dv + to, head.dv + j * head.wide, a.dim * sizeof(Real));
    }
}

template <typename Real> static void for_each_head(const TrainAttentionArgs<Real> &a,
                                                   void (*one)(const TrainAttentionArgs<Real> &, long, long, Real *)) {
    const long all = a.batch * a.groups;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.threads > 1)
    for (long part = 0; part < a.threads; part++)
        for (long i = all * part / a.threads; i < all * (part + 1) / a.threads; i++)
            one(a, i / a.groups, i % a.groups, a.room + part * a.room_step);
}

// Shares of a long row for each core, in whole blocks.
template <typename Work> INLINE void shares(long many, long block, int threads, Work work) {
    const long blocks = (many + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long part = 0; part < threads; part++) {
        long begin = blocks * part / threads * block, end = blocks * (part + 1) / threads * block;
        if (begin < many) work(begin, end < many ? end : many);
    }
}

// y = stream + x scale where it is kept. Sixteen bits for each channel follow from the seed and from where it stands,
// so that nothing is remembered.
enum { SOME = 32 };  // channels that share sixteen numbers: the first half takes their lower bits
template <typename Number> INLINE Number mixed(Number w, uint64_t seed) {
    w = w * 0x9E3779B9u + (uint32_t)seed;
    w = (w ^ w >> 16) * 0x21F0AAADu;
    w = (w ^ ((w >> 15) + (uint32_t)(seed >> 32))) * 0x735A2D97u;
    w = (w ^ w >> 15) * 0x846CA68Bu;
    return w ^ w >> 16;
}
INLINE void chances(double *kept, uint32_t first, uint32_t dropped, double scale, uint64_t seed) {
    for (uint32_t j = 0; j < SOME / 2; j++) {
        const uint32_t w = mixed(first + j, seed);
        kept[j] = (w & 0xFFFFu) >= dropped ? scale : 0;
        kept[SOME / 2 + j] = w >> 16 >= dropped ? scale : 0;
    }
}
static const uint32_t NUMBERS[SOME / 2] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
INLINE void chances(float *kept, uint32_t first, uint32_t dropped, float scale, uint64_t seed) {
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    typedef Of<float>::Vector Vector;
    const int lane = lanes<float>();
    for (int j = 0; j < SOME / 2; j += lane) {
        Words w;
        memcpy(&w, NUMBERS + j, BYTES);
        w = mixed(w + first, seed);
        const Of<float>::Mask low = (Of<float>::Mask)(w & 0xFFFFu), high = (Of<float>::Mask)(w >> 16);
        put(kept + j, low >= (int32_t)dropped ? Vector{} + scale : Vector{});
        put(kept + SOME / 2 + j, high >= (int32_t)dropped ? Vector{} + scale : Vector{});
    }
}
template <typename Real> static void drop(const Real *x, const Real *stream, Real *y, long many, uint32_t dropped,
                                          Real scale, uint64_t seed, int threads) {
    const int lane = lanes<Real>();
    shares(many, SOME, threads, [=](long begin, long end) {
        Real kept[SOME];
        for (long i = begin; i < end; i += SOME) {
            chances(kept, (uint32_t)(i / 2), dropped, scale, seed);
            const long whole = (end - i < SOME ? end - i : SOME) / lane * lane, some = end - i < SOME ? end - i : SOME;
            for (long j = 0; j < whole; j += lane) {
                typename Of<Real>::Vector one = load(x + i + j) * load(kept + j);
                put(y + i + j, stream ? load(stream + i + j) + one : one);
            }
            for (long j = whole; j < some; j++) y[i + j] = (stream ? stream[i + j] : Real(0)) + x[i + j] * kept[j];
        }
    });
}

// x += a row, and y = the activation of it; y may be x.
template <typename Real>
static void activation(Real *x, const Real *add, Real *y, long begin, long end, long wide, int how) {
    const long lane = lanes<Real>(), whole = wide / lane * lane;
    for (long r = begin; r < end; r++) {
        Real *row = x + r * wide;
        for (long j = 0; add && j < whole; j += lane) put(row + j, load(row + j) + load(add + j));
        for (long j = whole; add && j < wide; j++) row[j] += add[j];
        bends(row, y + r * wide, wide, how);
    }
}

// Rows of logits in bits -> 2^(logit - the largest), in place; the largest, the sum, and the logit of the right word.
template <typename Real> static void powers(Real *rows, const Real *bias, const int64_t *goal, Real *top, Real *mass,
                                            Real *right, long many, long words, int threads) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>(), whole = words / lane * lane;
    shares(many, 1, threads, [=](long begin, long end) {
        for (long r = begin; r < end; r++) {
            Real *row = rows + r * words, high = -INFINITY, rest = 0;
            Vector best = Vector{} - INFINITY, sums = {};
            if (bias) {
                for (long j = 0; j < whole; j += lane) put(row + j, load(row + j) + load(bias + j) * bits<Real>);
                for (long j = whole; j < words; j++) row[j] += bias[j] * bits<Real>;
            }
            for (long j = 0; j < whole; j += lane) {
                Vector one = load(row + j);
                best = one > best || one != one ? one : best;
            }
            for (int e = 0; e < lane; e++) high = best[e] > high || best[e] != best[e] ? best[e] : high;
            for (long j = whole; j < words; j++) high = row[j] > high || row[j] != row[j] ? row[j] : high;
            right[r] = row[goal[r]], top[r] = high;
            for (long j = 0; j < whole; j += lane) {
                Vector one = power(load(row + j) - high);
                put(row + j, one);
                sums += one;
            }
            for (long j = whole; j < words; j++) row[j] = Real(exp2(row[j] - high)), rest += row[j];
            mass[r] = sum(sums) + rest;
        }
    });
}

#define KERNELS(Real, name)                                                                                            \
    extern "C" {                                                                                                       \
    void attention_forward_##name(const TrainAttentionArgs<Real> *a) { for_each_head(*a, forward<Real>); }             \
    void attention_backward_##name(const TrainAttentionArgs<Real> *a) { for_each_head(*a, backward<Real>); }           \
    long attention_workspace_##name(const TrainAttentionArgs<Real> *a) { return Head<Real>(*a, 0).needs; }             \
    void activation_##name(Real *x, const Real *add, Real *y, long rows, long wide, int how, int threads) {            \
        shares(rows, 1, threads, [=](long begin, long end) { activation(x, add, y, begin, end, wide, how); });         \
    }                                                                                                                  \
    void activation_backward_##name(const Real *x, Real *y, Real *d, long many, int how, int threads) {                \
        shares(many, 64, threads,                                                                                      \
               [=](long begin, long end) { activation_backward(x + begin, y + begin, d + begin, end - begin, how); }); \
    }                                                                                                                  \
    void drop_##name(const Real *x, const Real *stream, Real *y, long many, int dropped, double scale, uint64_t seed,  \
                     int threads) {                                                                                    \
        drop(x, stream, y, many, dropped, Real(scale), seed, threads);                                                 \
    }                                                                                                                  \
    void powers_##name(Real *rows, const Real *bias, const int64_t *goal, Real *top, Real *mass, Real *right,          \
                       long many, long words, int threads) {                                                           \
        powers(rows, bias, goal, top, mass, right, many, words, threads);                                              \
    }                                                                                                                  \
    }
KERNELS(float, float32)
KERNELS(double, float64)

// The bytes of each struct that structs.py mirrors, in its order.
extern "C" int struct_size_train(int which) { return which == 0 ? sizeof(TrainAttentionArgs<double>) : 0; }
