// What decoding on a CPU spends its time on, where torch's own operations are far from what the machine can do:
// products of a few rows, products in eight bits, attention of a few queries over a cache, the top_k words.
// Compiled when first wanted and called by native/decode.py; everything here is also computed by torch where there is no
// compiler, and tested against that. Memory is the caller's; nothing is allocated, nothing is kept.

#include "vector.h"

// y = x W^T + b. W is read once, by all cores; its rows lie as torch has them. Those some way behind are fetched
// meanwhile, channels from `begin` to `end`: each of several calls for the same rows of W fetches its share.
enum { AHEAD = 16384 };  // bytes; so far ahead at least
template <typename Real> INLINE long ahead(long in) {
    const long block = OUTS * in * sizeof(Real);
    return (AHEAD + block - 1) / block * OUTS * in;
}
template <typename Real, int R>
static void dots(const Real *x, const Real *const *w, long in, Real (*y)[OUTS], long begin, long end) {
    typedef typename Of<Real>::Vector Vector;
    const int lane = lanes<Real>(), line = LINE / sizeof(Real);
    Vector s[R][OUTS] = {};
    long k = 0, next = ahead<Real>(in);
    for (; k + line <= in; k += line) {
        if (k >= begin && k < end)
            for (int o = 0; o < OUTS; o++) __builtin_prefetch(w[o] + k + next);
#pragma GCC unroll 2
        for (int i = 0; i < line; i += lane) {
            Vector u[R];
            for (int r = 0; r < R; r++) {
                u[r] = load(x + r * in + k + i);
                HOLD(u[r]);
            }
            for (int o = 0; o < OUTS; o++) {
                Vector v = load(w[o] + k + i);
                HOLD(v);
                for (int r = 0; r < R; r++) s[r][o] += u[r] * v;
            }
        }
    }
    for (int r = 0; r < R; r++) {
        sums(s[r], y[r]);
        for (long i = k; i < in; i++)
            for (int o = 0; o < OUTS; o++) y[r][o] += x[r * in + i] * w[o][i];
    }
}

template <typename Real> static void linear(const Real *x, const Real *weight, const Real *bias, Real *y, long step,
                                            long rows, long in, long out, Share own) {
    const long blocks = (out + OUTS - 1) / OUTS;
    for (long block = own.begin(blocks); block < own.end(blocks); block++) {
        const Real *w[OUTS];
        long begin = block * OUTS, many = out - begin < OUTS ? out - begin : OUTS;
        for (long o = 0; o < OUTS; o++) w[o] = weight + (begin + (o < many ? o : 0)) * in;
        for (long r = 0; r < rows;) {
            Real found[WIDE][OUTS];
            int some = rows - r >= WIDE ? WIDE : 1;
            const long from = in * r / rows, to = in * (r + some) / rows;
            (some == WIDE ? dots<Real, WIDE> : dots<Real, 1>)(x + r * in, w, in, found, from, to);
            for (int i = 0; i < some; i++)
                for (long o = 0; o < many; o++)
                    y[(r + i) * step + begin + o] = found[i][o] + (bias ? bias[begin + o] : Real(0));
            r += some;
        }
    }
}

// The same with weights of eight bits: see decode/int8.py. q is held as q + zero, which has no sign; sums are those of
// the weights of each output, to take zero away again. Rounding is as torch's quantised product has it.
template <int R>
INLINE void dots8(const uint8_t *q, const int8_t *const *w, long in, int32_t (*y)[OUTS], long begin, long end) {
    long k = 0, next = ahead<int8_t>(in);
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUTS; o++) y[r][o] = 0;
#if defined(__AVX512VNNI__)
    __m512i s[R][OUTS];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUTS; o++) s[r][o] = _mm512_setzero_si512();
    for (; k + 64 <= in; k += 64) {
        __m512i v[OUTS];
        if (k >= begin && k < end)
            for (int o = 0; o < OUTS; o++) __builtin_prefetch(w[o] + k + next);
        for (int o = 0; o < OUTS; o++) v[o] = _mm512_loadu_si512(w[o] + k);
        for (int r = 0; r < R; r++) {
            __m512i u = _mm512_loadu_si512(q + r * in + k);
            for (int o = 0; o < OUTS; o++) s[r][o] = _mm512_dpbusd_epi32(s[r][o], u, v[o]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUTS; o++) y[r][o] = _mm512_reduce_add_epi32(s[r][o]);
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i s[R][OUTS];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUTS; o++) s[r][o] = _mm256_setzero_si256();
    for (; k + 32 <= in; k += 32) {
        if (k % LINE == 0 && k >= begin && k < end)
            for (int o = 0; o < OUTS; o++) __builtin_prefetch(w[o] + k + next);
        for (int o = 0; o < OUTS; o++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w[o] + k));
            for (int r = 0; r < R; r++) {  // pairs fit into sixteen bits, since q has seven
                __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(q + r * in + k)), v);
                s[r][o] = _mm256_add_epi32(s[r][o], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    for (int r = 0; r < R; r++) {
        __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(s[r][0], s[r][1]), _mm256_hadd_epi32(s[r][2], s[r][3]));
        _mm_storeu_si128((__m128i *)y[r], _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    }
#endif
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUTS; o++) {
            int32_t total = 0;
            for (long i = k; i < in; i++) total += (int32_t)q[r * in + i] * (int32_t)w[o][i];
            y[r][o] += total;
        }
}

enum { STEPS = 63, ZERO = STEPS + 1 };  // of an input, on each side of zero; where zero is
template <typename Real> static void round8(const Real *x, long rows, long in, char *room, Share own) {
    const float steps_again = 1.f / (1.f / STEPS);
    const Real least = Real(1e-12);
    Real *most = (Real *)room;
    uint8_t *q = (uint8_t *)(most + rows);
    for (long r = own.begin(rows); r < own.end(rows); r++) {
        const Real *one = x + r * in;
        Real high = least;
        for (long i = 0; i < in; i++) {
            Real size = one[i] < 0 ? -one[i] : one[i];
            high = size > high || size != size ? size : high;
        }
        most[r] = high;
        for (long i = 0; i < in; i++)
            q[r * in + i] = (uint8_t)(int32_t)nearbyintf((float)(one[i] / high) * steps_again + ZERO);
    }
}

// Of what round8 has put there.
template <typename Real> static void linear8(const char *room, const int8_t *weight, const float *scale,
                                             const int32_t *sums, const Real *bias, Real *y, long step, long rows,
                                             long in, long out, Share own) {
    const float one_step = 1.f / STEPS;
    const Real *most = (const Real *)room;
    const uint8_t *q = (const uint8_t *)(most + rows);
    const long blocks = (out + OUTS - 1) / OUTS;
    for (long block = own.begin(blocks); block < own.end(blocks); block++) {
        const int8_t *w[OUTS];
        long begin = block * OUTS, many = out - begin < OUTS ? out - begin : OUTS;
        for (long o = 0; o < OUTS; o++) w[o] = weight + (begin + (o < many ? o : 0)) * in;
        for (long r = 0; r < rows;) {
            int32_t found[WIDE][OUTS];
            int some = rows - r >= WIDE ? WIDE : 1;
            const long from = in * r / rows, to = in * (r + some) / rows;
            if (some == WIDE)
                dots8<WIDE>(q + r * in, w, in, found, from, to);
            else
                dots8<1>(q + r * in, w, in, found, from, to);
            for (int i = 0; i < some; i++)
                for (long o = 0; o < many; o++) {
                    float whole = found[i][o] - ZERO * sums[begin + o];
                    y[(r + i) * step + begin + o] =
                        Real(whole * (one_step * scale[begin + o])) * most[r + i] + (bias ? bias[begin + o] : Real(0));
                }
            r += some;
        }
    }
}

// Rows in tiles: for every channel, those of ROWS rows side by side, times a factor.
template <typename Real> static void turn(const Real *x, Real *turned, long rows, long in, Real factor, Share own) {
    const long tiles = (rows + ROWS - 1) / ROWS;
    for (long r = own.begin(tiles) * ROWS; r < own.end(tiles) * ROWS; r += ROWS)
        for (long k = 0; k < in; k++)
            for (long i = 0; i < ROWS; i++)
                turned[r * in + k * ROWS + i] = r + i < rows ? x[(r + i) * in + k] * factor : 0;
}

template <typename Real> static __attribute__((noinline)) void
turned_tile(const Real *turned, const Real *panel, long in, typename Of<Real>::Vector (*found)[PANEL]) {
    tile<Real, true>(turned, ROWS, panel, in, found);
}

// The same as `linear` for many rows, which are in tiles, and whose weights are in panels.
template <typename Real> static void many(const Real *turned, const Real *packed, const Real *bias, Real *y, long step,
                                          long rows, long in, long out, Share own) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>(), panel = PANEL * lane, panels = (out + panel - 1) / panel;
    for (long o = own.begin(panels) * panel; o < own.end(panels) * panel; o += panel) {
        const long width = out - o < panel ? out - o : panel;
        Vector added[PANEL] = {};
        for (long j = 0; bias && j < width; j++) added[j / lane][j % lane] = bias[o + j];
        for (long r = 0; r < rows; r += ROWS) {
            Vector found[ROWS][PANEL];
            turned_tile(turned + r * in, packed + o * in, in, found);
            for (long i = 0; i < ROWS && r + i < rows; i++) {
                Real *to = y + (r + i) * step + o;
                for (int j = 0; j < PANEL; j++) found[i][j] += added[j];
                if (width == panel)
                    for (int j = 0; j < PANEL; j++) *(typename Of<Real>::Loose *)(to + j * lane) = found[i][j];
                else
                    memcpy(to, found[i], width * sizeof(Real));
            }
        }
    }
}

// A linear map as a model has it: in numbers of its own kind, maybe in panels as well, for many rows; or, where there
// is a scale, of eight bits.
struct LinearParams {
    const void *weight, *bias, *packed;
    const float *scale;
    const int32_t *sums;
    int64_t in, out;
};

// Cores for so much work: to wake the others takes as long as SMALL multiplications.
enum { SMALL = 1 << 15 };
INLINE int cores(long work, int threads) { return work < SMALL ? 1 : threads; }

// What a map wants to know of x, all of it, before cores begin with their shares: x in tiles or in eight bits.
template <typename Real> static void prepare(const LinearParams &map, const Real *x, long rows, char *room, Share own) {
    if (map.scale)
        round8(x, rows, map.in, room, own);
    else if (map.packed)
        turn(x, (Real *)room, rows, map.in, Real(1), own);
    else
        return;
    wait(own);
}

// A share of y = the map of x, which is prepared; `step` from row to row of y.
template <typename Real>
static void apply(const LinearParams &map, const Real *x, Real *y, long step, long rows, const char *room, Share own) {
    const Real *bias = (const Real *)map.bias;
    if (map.scale)
        linear8(room, (const int8_t *)map.weight, map.scale, map.sums, bias, y, step, rows, map.in, map.out, own);
    else if (map.packed)
        many((const Real *)room, (const Real *)map.packed, bias, y, step, rows, map.in, map.out, own);
    else
        linear(x, (const Real *)map.weight, bias, y, step, rows, map.in, map.out, own);
}
INLINE int cores(const LinearParams &map, long rows, int threads) {
    return cores(map.packed ? rows * map.in * map.out / 16 : map.in * map.out, threads);
}

// o_i = sum over j of softmax_j(scale q_i . k_j + bias_ij) v_j. Where `held` is given, the j-th key of row b is that of
// row held[b][j]: rows of a beam that have a common past share it.
template <typename Real> struct AttentionArgs {
    const Real *q, *k, *v;
    const void *added;  // what is added to scores, or a byte for each that tells whether it counts
    const int64_t *held;
    Real *y;  // (batch, queries, heads, dim)
    Real *room;  // (threads, heads, keys and a vector) for scores
    int64_t batch, heads, groups, queries, keys, dim, value_dim, hides, held_step, threads;
    int64_t q_step[3], k_step[3], v_step[3], added_step[4];  // batch, head, place, and key
    double scale;  // of q . k
};

// One query of some heads of a row: a key and a value lie side by side for all heads, and are fetched once for all.
// Channels are held in N vectors; N = 0: of any number.
template <typename Real, int N>
static void look(const AttentionArgs<Real> &a, long b, long first, long last, long i, Real *scores) {
    typedef typename Of<Real>::Vector Vector;
    typedef typename Of<Real>::Loose Loose;
    const int lane = lanes<Real>();
    const Real none = -INFINITY;
    const long share = a.heads / a.groups, line = (a.keys + lane - 1) / lane * lane;
    const int64_t *held = a.held ? a.held + b * a.held_step : 0;
    const char *added = (const char *)a.added;
    const long size = a.hides ? 1 : sizeof(Real), next = a.added_step[3] * size, other = a.added_step[1] * size;
    if (added) added += (b * a.added_step[0] + first * a.added_step[1] + i * a.added_step[2]) * size;
    const Real *q = a.q + b * a.q_step[0] + first * a.q_step[1] + i * a.q_step[2];
    for (long j = 0; j < a.keys; j += OUTS) {  // some keys at a time, so that their sums are made together
        const long some = a.keys - j < OUTS ? a.keys - j : OUTS;
        const Real *keys[OUTS];
        for (long o = 0; o < OUTS; o++) {
            const long at = o < some ? j + o : j;
            keys[o] = a.k + (held ? held[at] : b) * a.k_step[0] + at * a.k_step[2];
        }
        for (long h = first; h < last; h++) {
            const Real *asked = q + (h - first) * a.q_step[1];
            const long own = (share == 1 ? h : h / share) * a.k_step[1];
            Real found[OUTS] = {}, *score = scores + (h - first) * line + j;
            if (N) {
                Vector total[OUTS] = {};
                for (int n = 0; n < N; n++)
                    for (int o = 0; o < OUTS; o++) total[o] += load(asked + n * lane) * load(keys[o] + own + n * lane);
                sums(total, found);
            }
            for (long o = 0; o < some; o++) {
                const char *extra = added + (h - first) * other + (j + o) * next;
                for (long d = 0; !N && d < a.dim; d++) found[o] += asked[d] * keys[o][own + d];
                found[o] *= Real(a.scale);
                if (added && !a.hides) found[o] += *(const Real *)extra;
                score[o] = a.hides && !*extra ? none : found[o] * bits<Real>;
            }
        }
    }
    Real *y = a.y + ((b * a.queries + i) * a.heads + first) * a.value_dim;
    memset(y, 0, (last - first) * a.value_dim * sizeof(Real));
    for (long h = first; h < last; h++) {
        Real *mine = scores + (h - first) * line;
        for (long j = a.keys; j < line; j++) mine[j] = none;
        Vector best = load(mine), mass = {};
        for (long j = lane; j < line; j += lane) best = load(mine + j) > best ? load(mine + j) : best;
        Real high = best[0];
        for (int e = 1; e < lane; e++) high = best[e] > high ? best[e] : high;
        if (!(high > none)) {  // there is nothing to see, or nothing but what is not a number
            for (long j = 0; j < a.keys; j++) mine[j] = mine[j] == none ? Real(0) : mine[j];
            continue;
        }
        for (long j = 0; j < line; j += lane) {
            Vector one = power(load(mine + j) - high);
            *(Loose *)(mine + j) = one;
            mass += one;
        }
        const Real whole = 1 / sum(mass);
        for (long j = 0; j < line; j += lane) *(Loose *)(mine + j) = load(mine + j) * whole;
    }
    for (long j = 0; j < a.keys; j += OUTS) {
        const long some = a.keys - j < OUTS ? a.keys - j : OUTS;
        const Real *values[OUTS];
        for (long o = 0; o < some; o++)
            values[o] = a.v + (held ? held[j + o] : b) * a.v_step[0] + (j + o) * a.v_step[2];
        for (long h = first; h < last; h++) {
            const Real *weight = scores + (h - first) * line + j;
            const long own = (share == 1 ? h : h / share) * a.v_step[1];
            Real *to = y + (h - first) * a.value_dim;
            if (N && some == OUTS && weight[0] != 0 && weight[1] != 0 && weight[2] != 0 && weight[3] != 0) {
                for (int n = 0; n < N; n++) {
                    Vector whole = load(to + n * lane);
                    for (int o = 0; o < OUTS; o++) whole += weight[o] * load(values[o] + own + n * lane);
                    *(Loose *)(to + n * lane) = whole;
                }
                continue;
            }
            for (long o = 0; o < some; o++) {
                if (weight[o] == 0) continue;  // nobody looks there
                const Real *value = values[o] + own;
                for (int n = 0; n < N; n++)
                    *(Loose *)(to + n * lane) = load(to + n * lane) + weight[o] * load(value + n * lane);
                for (long d = 0; !N && d < a.value_dim; d++) to[d] += weight[o] * value[d];
            }
        }
    }
}

template <typename Real> static void attend(const AttentionArgs<Real> &a, long part) {
    const int lane = lanes<Real>();
    const long vectors = a.dim % lane || a.dim != a.value_dim ? 0 : a.dim / lane;
    const auto some_heads = vectors == 1    ? look<Real, 1>
                            : vectors == 2  ? look<Real, 2>
                            : vectors == 3  ? look<Real, 3>
                            : vectors == 4  ? look<Real, 4>
                            : vectors == 8  ? look<Real, 8>
                            : vectors == 16 ? look<Real, 16>
                                            : look<Real, 0>;
    Real *scores = a.room + part * a.heads * (a.keys + lane);
    long all = a.batch * a.heads, end = all * (part + 1) / a.threads;
    for (long one = all * part / a.threads, next; one < end; one = next) {
        long b = one / a.heads, first = one % a.heads;
        next = (b + 1) * a.heads < end ? (b + 1) * a.heads : end;
        for (long i = 0; i < a.queries; i++) some_heads(a, b, first, next - b * a.heads, i, scores);
    }
}
template <typename Real> static void attend(const AttentionArgs<Real> &a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.threads > 1)
    for (long part = 0; part < a.threads; part++) attend(a, part);
}

// x <- after(x + f(before(x))): a branch of a layer, for the next position of every row. f is a feed-forward, W_2
// activation(W_1 x), maybe with a gate, W_2 (activation(W_1 x) * W_3 x); or, where it attends: queries, keys and values
// of x, keys and values into the slot of their cache, what the query finds there, and a last map. Without maps to keys
// and values, what is there already is looked at. Queries and keys may be turned: pairs of channels, by angles whose
// cos and sin are given.
struct NormParams {  // a norm
    const void *weight, *bias;
    double eps;
    int64_t centres;  // it takes the mean away, too
};
template <typename Real> struct FusedBranch {
    AttentionArgs<Real> looks;
    const NormParams *before, *after;
    const LinearParams *first, *key, *value,
        *last;  // to queries or to what is activated, to keys or to what a gate lets through, ..., back
    const Real *cos, *sin;  // (rows or 1, pairs)
    Real *key_slot, *value_slot;  // where those of the first row go; the next row is a step of the cache behind
    int64_t attends, how, adds;  // adds: to x; otherwise f(x) is all
    int64_t pairs, pairs_step,
        halves;  // halves: a channel turns with the one so many behind it, else with the next one
};

// Turns the first pairs of channels of every head of a row.
template <typename Real> static void spin(const FusedBranch<Real> &a, Real *x, long heads, long step, long row) {
    const Real *cos = a.cos + row * a.pairs_step, *sin = a.sin + row * a.pairs_step;
    const long near = a.halves ? 1 : 2, far = a.halves ? a.pairs : 1;
    for (long h = 0; h < heads; h++, x += step)
        for (long i = 0; i < a.pairs; i++) {
            const Real one = x[i * near], two = x[i * near + far];
            x[i * near] = one * cos[i] - two * sin[i];
            x[i * near + far] = two * cos[i] + one * sin[i];
        }
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias, of one row; y may be x
template <typename Real> static void measure(const NormParams &gauge, const Real *x, Real *y, long wide) {
    typedef typename Of<Real>::Vector Vector;
    typedef typename Of<Real>::Loose Loose;
    const long lane = lanes<Real>(), whole = wide / lane * lane;
    const Real *weight = (const Real *)gauge.weight, *bias = (const Real *)gauge.bias;
    Real mean = 0, square = 0;
    if (gauge.centres) {
        Vector some = {};
        for (long i = 0; i < whole; i += lane) some += load(x + i);
        mean = sum(some);
        for (long i = whole; i < wide; i++) mean += x[i];
        mean /= wide;
    }
    Vector some = {};
    for (long i = 0; i < whole; i += lane) {
        Vector far = load(x + i) - mean;
        some += far * far;
    }
    square = sum(some);
    for (long i = whole; i < wide; i++) square += (x[i] - mean) * (x[i] - mean);
    const Real scale = 1 / Real(sqrt(square / wide + Real(gauge.eps)));
    long i = 0;
    for (; weight && bias && i < whole; i += lane)
        *(Loose *)(y + i) = (load(x + i) - mean) * scale * load(weight + i) + load(bias + i);
    for (; i < wide; i++) y[i] = (x[i] - mean) * scale * (weight ? weight[i] : Real(1)) + (bias ? bias[i] : Real(0));
}

// Workspace is the caller's, for all branches one after the other: what they have in common, and what each puts there.
template <typename Real> struct Workspace {
    Real *normed, *found, *middle, *other;  // (rows, width) twice; queries or what is activated; what queries find
    Real *scores;
    char *maps;
};

// `back` steps before the one that the branch is for, keys and values go into the slot so far before, and fewer are seen.
template <typename Real> static void branch(const FusedBranch<Real> &a, const Real *x, Real *y,
                                            const Workspace<Real> &room, long rows, long back, Share own) {
    const LinearParams &first = *a.first, &last = *a.last;
    prepare(first, x, rows, room.maps, own);  // keys and values want the same
    apply(first, x, room.middle, first.out, rows, room.maps, own);
    const Real *from = room.middle;
    if (a.attends) {
        AttentionArgs<Real> looks = a.looks;
        Real *key_slot = a.key_slot - back * looks.k_step[2], *value_slot = a.value_slot - back * looks.v_step[2];
        if (a.key) {
            apply(*a.key, x, key_slot, looks.k_step[0], rows, room.maps, own);
            apply(*a.value, x, value_slot, looks.v_step[0], rows, room.maps, own);
            looks.keys -= back;
        }
        wait(own);
        if (a.cos) {
            for (long r = own.begin(rows); r < own.end(rows); r++) {
                spin(a, room.middle + r * first.out, a.looks.heads, a.looks.dim, r);
                spin(a, key_slot + r * looks.k_step[0], looks.groups, looks.k_step[1], r);
            }
            wait(own);
        }
        looks.q = room.middle, looks.y = room.other, looks.room = room.scores, from = room.other;
        for (long part = own.which; part < looks.threads; part += own.all) attend(looks, part);
    } else {
        if (a.key) apply(*a.key, x, room.other, first.out, rows, room.maps, own);
        wait(own);
        const long all = rows * first.out, begin = own.begin(all), end = own.end(all);
        bends(room.middle + begin, room.middle + begin, end - begin, a.how);
        for (long i = begin; a.key && i < end; i++) room.middle[i] *= room.other[i];
    }
    wait(own);
    prepare(last, from, rows, room.maps, own);
    apply(last, from, y, last.out, rows, room.maps, own);
    wait(own);
}

// Branches one after the other: x (rows, wide) -> y, which may be x
template <typename Real> static void run(const FusedBranch<Real> *branches, long many, const NormParams *end,
                                         const Real *x, Real *y, const Workspace<Real> &room, long rows, long wide,
                                         long back, Share own) {
    const long begin = own.begin(rows), stop = own.end(rows);
    const Real *now = x;
    for (const FusedBranch<Real> *one = branches; one < branches + many; one++) {
        const Real *seen = now;
        if (one->before) {
            for (long r = begin; r < stop; r++) measure(*one->before, now + r * wide, room.normed + r * wide, wide);
            seen = room.normed;
            wait(own);
        }
        branch(*one, seen, one->adds ? room.found : y, room, rows, back, own);
        if (!one->adds) continue;
        for (long i = begin * wide; i < stop * wide; i++) y[i] = now[i] + room.found[i];
        now = y;
        for (long r = begin; one->after && r < stop; r++) measure(*one->after, y + r * wide, y + r * wide, wide);
        if (one + 1 < branches + many && !one[1].before) wait(own);
    }
    for (long r = begin; end && r < stop; r++) measure(*end, y + r * wide, y + r * wide, wide);
}

// Of rows x, the top_k words and the sum of all 2^(score - best): scores are used where they are made, in registers.
template <typename Real> struct Row {
    typename Of<Real>::Vector mass;
    Real most, low, best[KEEP];
    int64_t at[KEEP];
};

template <typename Real>
static __attribute__((noinline)) void put(Row<Real> *row, const Real *scores, long first, long many, int keep) {
    for (long j = 0; j < many; j++) {
        Real score = scores[j];
        if (!(score > row->low)) continue;
        int i = keep - 1;
        for (; i > 0 && row->best[i - 1] < score; i--) row->best[i] = row->best[i - 1], row->at[i] = row->at[i - 1];
        row->best[i] = score, row->at[i] = first + j, row->low = row->best[keep - 1];
    }
    if (row->best[0] > row->most) {
        row->mass *= power(typename Of<Real>::Vector{} + (row->most - row->best[0]));
        row->most = row->best[0];
    }
}

template <typename Real> static void clear(Row<Real> *row, int keep) {
    row->mass = typename Of<Real>::Vector{}, row->low = -INFINITY;
    row->most = sizeof(Real) == 4 ? Real(-3e38) : Real(-1e300);
    for (int i = 0; i < keep; i++) row->best[i] = -INFINITY, row->at[i] = 0;
}

// The same from the scores of a row.
template <typename Real> static void look_through(const Real *scores, long words, int keep, Row<Real> *row) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>();
    clear(row, keep);
    for (long o = 0; o < words; o += lane) {
        const long many = words - o < lane ? words - o : lane;
        Vector found = Vector{} - INFINITY;
        memcpy(&found, scores + o, many * sizeof(Real));
        found *= bits<Real>;
        if (any(found > row->low)) put(row, (const Real *)&found, o, many, keep);
        row->mass += power(found - row->most);
    }
}

template <typename Real> static void top_k(const Real *x, const Real *packed, const Real *bias, Real *best, int64_t *at,
                                           Real *mass, Real *turned, Row<Real> *state, long rows, long in, long words,
                                           int keep) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>(), panel = PANEL * lane;
    const Real none = -INFINITY;
    for (long r = 0; r < rows; r++) clear(state + r, keep);
    turn(x, turned, rows, in, bits<Real>, Share{0, 1});
    for (long o = 0; o < words; o += panel) {
        const long many = words - o < panel ? words - o : panel;
        Vector added[PANEL] = {};
        for (long j = 0; j < panel; j++)
            added[j / lane][j % lane] = j >= many ? none : bias ? bias[o + j] * bits<Real> : Real(0);
        for (long r = 0; r < rows; r += ROWS) {
            Vector found[ROWS][PANEL];
            turned_tile(turned + r * in, packed + o * in, in, found);
            for (long i = 0; i < ROWS && r + i < rows; i++) {
                Row<Real> *row = state + r + i;
                found[i][0] += added[0], found[i][1] += added[1];
                if (any((found[i][0] > row->low) | (found[i][1] > row->low)))
                    put(row, (const Real *)found[i], o, many, keep);
                row->mass += power(found[i][0] - row->most) + power(found[i][1] - row->most);
            }
        }
    }
    for (long r = 0; r < rows; r++) {
        mass[r] = sum(state[r].mass);
        for (int i = 0; i < keep; i++)
            best[r * keep + i] = state[r].best[i] / bits<Real>, at[r * keep + i] = state[r].at[i];
    }
}

// Beam search for one sentence; a beam of one is greedy search. A step embeds the last token of every hypothesis, runs
// the branches, which are those of the last step, multiplies by the output table, and finds the best continuations, twice
// as many as hypotheses, since some may be over. The search is, too, when as many have ended as there are hypotheses.
template <typename Real> struct SearchArgs {
    const Real *table, *added;  // (vocab, wide); and (steps, wide), what a position adds to the vector of a token
    const LinearParams *output;
    Real *x, *logits;  // (size, wide), (size, vocab)
    int64_t *held;  // (size, slots) twice: the row that holds each key, and room to change it
    int64_t *tokens, *parents;  // (steps, 2 size): of the continuations of each step, best first
    Real *totals;  // of log-probabilities
    int64_t size, wide, slots, steps, first, end;  // the first and the last token
    double scale;  // of the table
};
enum { HYPOTHESES = KEEP / 2 };

template <typename Real> struct Hypotheses {
    int64_t size, last[HYPOTHESES], parent[HYPOTHESES], ended;
    Real total[HYPOTHESES];
};

// The best `keep` continuations of all hypotheses, from the best of each, as `look_through` has found them.
template <typename Real>
static void extend(const Hypotheses<Real> &now, const Row<Real> *rows, long keep, int64_t *tokens, int64_t *parents,
                   Real *totals) {
    for (long i = 0; i < keep; i++) totals[i] = -INFINITY, parents[i] = tokens[i] = 0;
    for (long r = 0; r < now.size; r++) {
        const Real mass = log(sum(rows[r].mass));
        for (long i = 0; i < keep; i++) {
            const Real total = now.total[r] + (rows[r].best[i] - rows[r].best[0]) / bits<Real> - mass;
            if (!(total > totals[keep - 1])) break;
            long j = keep - 1;
            for (; j > 0 && totals[j - 1] < total; j--)
                totals[j] = totals[j - 1], parents[j] = parents[j - 1], tokens[j] = tokens[j - 1];
            totals[j] = total, parents[j] = r, tokens[j] = rows[r].at[i];
        }
    }
}

// Of continuations, those that go on become the hypotheses of the next step. Of those that have ended, only the better
// half counts.
template <typename Real>
static void go_on(Hypotheses<Real> &now, long size, long end, const int64_t *tokens, const int64_t *parents,
                  const Real *totals) {
    now.size = 0;
    for (long i = 0; i < 2 * size; i++) {
        if (!(totals[i] > -INFINITY)) break;
        if (tokens[i] == end) {
            now.ended += i < size;
        } else if (now.size < size) {
            now.last[now.size] = tokens[i], now.parent[now.size] = parents[i], now.total[now.size++] = totals[i];
        }
    }
}

// Returns how many steps were taken.
template <typename Real> static long search(const FusedBranch<Real> *branches, long many, const NormParams *end,
                                            const SearchArgs<Real> &a, const Workspace<Real> &room, int threads) {
    const long vocab = a.output->out, keep = 2 * a.size, before = a.slots - a.steps;  // keys of the prefix
    Row<Real> rows[HYPOTHESES];
    Hypotheses<Real> now = {1, {a.first}};
    long at = 0;
    spread(threads, [&](Share own) {
        while (at < a.steps && now.size && now.ended < a.size) {
            const long begin = own.begin(now.size), stop = own.end(now.size);
            for (long r = begin; r < stop; r++) {
                a.held[r * a.slots + before + at] = r;
                for (long i = 0; i < a.wide; i++)
                    a.x[r * a.wide + i] = a.table[now.last[r] * a.wide + i] * Real(a.scale) + a.added[at * a.wide + i];
            }
            wait(own);
            run(branches, many, end, a.x, a.x, room, now.size, a.wide, a.steps - 1 - at, own);
            wait(own);
            prepare(*a.output, a.x, now.size, room.maps, own);
            apply(*a.output, a.x, a.logits, vocab, now.size, room.maps, own);
            wait(own);
            for (long r = begin; r < stop; r++) look_through(a.logits + r * vocab, vocab, keep, rows + r);
            wait(own);
            if (own.which == 0) {
                int64_t *tokens = a.tokens + at * keep, *parents = a.parents + at * keep;
                Real *totals = a.totals + at * keep;
                extend(now, rows, keep, tokens, parents, totals);
                go_on(now, a.size, a.end, tokens, parents, totals);
                memcpy(a.held + a.size * a.slots, a.held, a.size * a.slots * sizeof(int64_t));
                for (long r = 0; r < now.size; r++)
                    memcpy(a.held + r * a.slots, a.held + (a.size + now.parent[r]) * a.slots,
                           a.slots * sizeof(int64_t));
                at++;
            }
            wait(own);
        }
    });
    return at;
}

#define KERNELS(Real, name)                                                                                            \
    extern "C" {                                                                                                       \
    void apply_##name(const LinearParams *map, const Real *x, Real *y, long rows, char *room, int threads) {           \
        spread(cores(*map, rows, threads), [=](Share own) {                                                            \
            prepare(*map, x, rows, room, own);                                                                         \
            apply(*map, x, y, map->out, rows, room, own);                                                              \
        });                                                                                                            \
    }                                                                                                                  \
    void run_##name(const FusedBranch<Real> *branches, long many, const NormParams *end, const Real *x, Real *y,       \
                    const Workspace<Real> *room, long rows, long wide, int threads) {                                  \
        spread(threads, [=](Share own) { run(branches, many, end, x, y, *room, rows, wide, 0, own); });                \
    }                                                                                                                  \
    long search_##name(const FusedBranch<Real> *branches, long many, const NormParams *end,                            \
                       const SearchArgs<Real> *a, const Workspace<Real> *room, int threads) {                          \
        return search(branches, many, end, *a, *room, threads);                                                        \
    }                                                                                                                  \
    void attend_##name(const AttentionArgs<Real> *a) { attend(*a); }                                                   \
    void top_k_##name(const Real *x, const Real *p, const Real *b, Real *best, int64_t *at, Real *mass, Real *turned,  \
                      void *state, long rows, long in, long words, int keep) {                                         \
        top_k(x, p, b, best, at, mass, turned, (Row<Real> *)state, rows, in, words, keep);                             \
    }                                                                                                                  \
    long row_##name(void) { return sizeof(Row<Real>); }                                                                \
    }
KERNELS(float, float32)
KERNELS(double, float64)
extern "C" int sizes(int which) { return which == 0 ? ROWS : which == 1 ? PANEL * BYTES : KEEP; }

// The bytes of each struct that structs.py mirrors, in its order.
extern "C" int struct_size_decode(int which) {
    return which == 0   ? sizeof(LinearParams)
           : which == 1 ? sizeof(AttentionArgs<double>)
           : which == 2 ? sizeof(NormParams)
           : which == 3 ? sizeof(FusedBranch<double>)
           : which == 4 ? sizeof(Workspace<double>)
           : which == 5 ? sizeof(SearchArgs<double>)
                        : 0;
}
