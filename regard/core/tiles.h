// Products of floats by the processor's matrix tiles (Intel's AMX), which multiply numbers of sixteen bits sixteen times as
// fast as floats are multiplied elsewhere. A float is the sum of three such numbers, exactly:
//
//     x = x1 + x2 + x3        x y = x1 y1 + x1 y2 + x2 y1 + x1 y3 + x2 y2 + x3 y1  + less than 2^-23 of x y
//
// so six products of sixteen bits, added up in floats, are as good as one of floats, and two to three times as fast.
// Henry et al. 2019, arXiv:1904.06376. Where there are no such tiles, nothing of this is compiled; with EMULATE_TILES, which
// is for tests, they are made of plain loops.

#pragma once

#if (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)) || defined(EMULATE_TILES)
#define TILES 1
#else
#define TILES 0
#endif

#if TILES
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if !defined(EMULATE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

enum { SIDE = 16, PAIR = 2 * SIDE };  // of a tile: lines, and pairs of numbers in a line; numbers that are summed up at once
enum { PARTS = 3, BESIDE = 2 };  // of a number; tiles side by side
enum { TILE = SIDE * SIDE, PART = BESIDE * TILE, BLOCK = PARTS * PART };  // pairs in each

enum { FAR = 4 * PAIR };  // numbers of a row that are fetched ahead

typedef float Line __attribute__((vector_size(4 * SIDE)));
typedef float Loose __attribute__((vector_size(4 * SIDE), aligned(4), may_alias));
typedef uint32_t Pairs __attribute__((vector_size(4 * SIDE)));
typedef uint32_t LoosePairs __attribute__((vector_size(4 * SIDE), aligned(4), may_alias));

#if defined(EMULATE_TILES)
struct Kept {
    uint32_t held[8][SIDE][SIDE];
};
static thread_local Kept kept;
inline float real(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
#define TILE_ZERO(t) memset(tiles::kept.held[t], 0, sizeof(tiles::kept.held[t]))
#define TILE_LOAD(t, from, step)                                                                                       \
    for (long i_ = 0; i_ < tiles::SIDE; i_++) memcpy(tiles::kept.held[t][i_], (const char *)(from) + i_ * (step), 64)
#define TILE_STORE(t, to, step)                                                                                        \
    for (long i_ = 0; i_ < tiles::SIDE; i_++) memcpy((char *)(to) + i_ * (step), tiles::kept.held[t][i_], 64)
inline void add_product(int to, int one, int other) {
    for (int r = 0; r < SIDE; r++)
        for (int c = 0; c < SIDE; c++) {
            float total = real(kept.held[to][r][c]);
            for (int k = 0; k < SIDE; k++) {
                const uint32_t x = kept.held[one][r][k], y = kept.held[other][k][c];
                total += real(x << 16) * real(y << 16) + real(x & 0xFFFF0000u) * real(y & 0xFFFF0000u);
            }
            memcpy(&kept.held[to][r][c], &total, 4);
        }
}
#define TILE_PRODUCT(to, one, other) tiles::add_product(to, one, other)
struct Ready {};
inline bool allowed() { return true; }
#else
#define TILE_ZERO _tile_zero
#define TILE_LOAD _tile_loadd
#define TILE_STORE _tile_stored
#define TILE_PRODUCT _tile_dpbf16ps

// As long as it lives, this thread has eight tiles of sixteen lines of 64 bytes.
struct Ready {
    Ready() {
        struct {
            uint8_t palette, begin, none[14];
            uint16_t bytes[16];
            uint8_t lines[16];
        } asked = {};
        asked.palette = 1;
        for (int t = 0; t < 8; t++) asked.bytes[t] = 4 * SIDE, asked.lines[t] = SIDE;
        _tile_loadconfig(&asked);
    }
    ~Ready() { _tile_release(); }
    Ready(const Ready &) = delete;
};

// The system gives their memory to whoever asks, for the whole process.
inline bool allowed() {
    enum { ASK = 0x1023, TILE_DATA = 18 };  // as Linux has them
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}
#endif

// y[i][l] = x[l][i]
inline void turn(Line *x) {
#if defined(__AVX512F__)
    __m512 a[SIDE], b[SIDE];
    for (int i = 0; i < SIDE; i++) a[i] = (__m512)x[i];
    for (int i = 0; i < SIDE; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < SIDE; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm512_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
        }
    for (int i = 0; i < SIDE; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xDD);
        }
    for (int j = 0; j < 8; j++) {
        x[j] = (Line)_mm512_shuffle_f32x4(b[j], b[j + 8], 0x88);
        x[j + 8] = (Line)_mm512_shuffle_f32x4(b[j], b[j + 8], 0xDD);
    }
#else
    Line y[SIDE];
    for (int i = 0; i < SIDE; i++)
        for (int l = 0; l < SIDE; l++) y[i][l] = x[l][i];
    memcpy(x, y, sizeof(y));
#endif
}

// to[i][l] = x[i, l], whose lines lie `step` apart and whose numbers `next`, for some lines of some numbers; 0 elsewhere.
inline void fetch(const float *x, long step, long next, long lines, long many, Line *to) {
    lines = lines < 0 ? 0 : lines < SIDE ? lines : SIDE, many = many < 0 ? 0 : many < SIDE ? many : SIDE;
    if (lines == SIDE && many == SIDE && next == 1) {
        for (int i = 0; i < SIDE; i++) to[i] = *(const Loose *)(x + i * step);
        return;
    }
    if (lines == SIDE && many == SIDE && step == 1) {
        for (int l = 0; l < SIDE; l++) {
            __builtin_prefetch(x + (l + PAIR) * next);
            to[l] = *(const Loose *)(x + l * next);
        }
        turn(to);
        return;
    }
    for (int i = 0; i < SIDE; i++) {
        to[i] = Line{};
        if (i >= lines) continue;
        if (next == 1)
            memcpy(&to[i], x + i * step, many * sizeof(float));
        else
            for (int l = 0; l < many; l++) to[i][l] = x[i * step + l * next];
    }
}

// The parts of two numbers beside each other: the lower half of each pair is the first one's. What is left in the end has no
// more than eight bits, so that nothing is lost by cutting it off; and what is not a number stays so.
inline void split(Line one, Line other, uint32_t *to) {
    const Pairs high = Pairs{} + 0xFFFF0000u;
    for (int part = 0; part < PARTS; part++) {
        const uint32_t half = part + 1 < PARTS ? 0x8000u : 0;
        const Pairs a = ((Pairs)one + half) & high, b = ((Pairs)other + half) & high;
        *(LoosePairs *)(to + part * PART) = a >> 16 | b;
        one -= (Line)a, other -= (Line)b;
    }
}

inline long blocks(long deep) { return (deep + PAIR - 1) / PAIR; }

// Up to 32 rows of x (rows, deep), times a factor, as the left of a product: numbers of a line are summed up over.
inline void left(const float *x, long row, long down, long rows, long deep, float factor, uint32_t *to) {
    for (long k = 0; k < deep; k += PAIR, to += BLOCK)
        for (long r = 0; r < rows; r += SIDE) {
            const float *from = x + r * row + k * down;
            if (down == 1 && factor == 1 && rows - r >= SIDE && deep - k >= PAIR) {
                for (int i = 0; i < SIDE; i++) {
                    __builtin_prefetch(from + i * row + FAR), __builtin_prefetch(from + i * row + FAR + SIDE);
                    split(*(const Loose *)(from + i * row), *(const Loose *)(from + i * row + SIDE),
                          to + r / SIDE * TILE + i * SIDE);
                }
                continue;
            }
            Line one[SIDE], other[SIDE];
            fetch(from, row, down, rows - r, deep - k, one);
            fetch(from + SIDE * down, row, down, rows - r, deep - k - SIDE, other);
            for (int i = 0; i < SIDE; i++)
                split(factor == 1 ? one[i] : one[i] * factor, factor == 1 ? other[i] : other[i] * factor,
                      to + r / SIDE * TILE + i * SIDE);
        }
}

// Up to 32 columns of p (deep, columns) as the right of a product: lines are summed up over.
inline void right(const float *p, long down, long beside, long columns, long deep, uint32_t *to) {
    for (long k = 0; k < deep; k += PAIR, to += BLOCK)
        for (long c = 0; c < PAIR; c += SIDE) {
            const float *from = p + k * down + c * beside;
            if (beside == 1 && columns - c >= SIDE && deep - k >= PAIR) {
                for (int i = 0; i < SIDE; i++)
                    split(*(const Loose *)(from + i * down), *(const Loose *)(from + (i + SIDE) * down),
                          to + c / SIDE * TILE + i * SIDE);
                continue;
            }
            Line one[SIDE], other[SIDE];
            fetch(from, down, beside, deep - k, columns - c, one);
            fetch(from + SIDE * down, down, beside, deep - k - SIDE, columns - c, other);
            for (int i = 0; i < SIDE; i++) split(one[i], other[i], to + c / SIDE * TILE + i * SIDE);
        }
}

// The six products of one block of the sum, the least first: of each, one part is there already, and the other is loaded
// while the one before is still multiplied.
template <int HIGH> inline __attribute__((always_inline)) void add_block(const uint32_t *x, const uint32_t *p) {
    const long line = 4 * SIDE;
    TILE_LOAD(6, p + 2 * PART, line);
    TILE_LOAD(4, x, line);
    TILE_PRODUCT(0, 4, 6);
    if (HIGH > 1) {
        TILE_LOAD(5, x + TILE, line);
        TILE_PRODUCT(2, 5, 6);
    }
    TILE_LOAD(6, p + PART, line);
    TILE_LOAD(7, p + 2 * PART + TILE, line);
    TILE_PRODUCT(1, 4, 7);
    if (HIGH > 1) {
        TILE_PRODUCT(3, 5, 7);
    }

    TILE_PRODUCT(0, 4, 6);
    TILE_LOAD(7, p + PART + TILE, line);
    if (HIGH > 1) {
        TILE_PRODUCT(2, 5, 6);
    }
    TILE_PRODUCT(1, 4, 7);
    TILE_LOAD(4, x + PART, line);
    if (HIGH > 1) {
        TILE_PRODUCT(3, 5, 7);
        TILE_LOAD(5, x + PART + TILE, line);
    }

    TILE_PRODUCT(1, 4, 7);
    TILE_PRODUCT(0, 4, 6);
    if (HIGH > 1) {
        TILE_PRODUCT(3, 5, 7);
    }
    TILE_LOAD(7, p + TILE, line);
    if (HIGH > 1) {
        TILE_PRODUCT(2, 5, 6);
    }
    TILE_LOAD(6, p, line);

    TILE_PRODUCT(1, 4, 7);
    if (HIGH > 1) {
        TILE_PRODUCT(3, 5, 7);
    }
    TILE_PRODUCT(0, 4, 6);
    TILE_LOAD(4, x + 2 * PART, line);
    if (HIGH > 1) {
        TILE_PRODUCT(2, 5, 6);
        TILE_LOAD(5, x + 2 * PART + TILE, line);
    }

    TILE_PRODUCT(0, 4, 6);
    TILE_PRODUCT(1, 4, 7);
    TILE_LOAD(4, x, line);
    if (HIGH > 1) {
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
        TILE_LOAD(5, x + TILE, line);
    }

    TILE_PRODUCT(0, 4, 6);
    TILE_PRODUCT(1, 4, 7);
    if (HIGH > 1) {
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
    }
}

// y (16 HIGH, 32) = x p + what it begins with: the rows of y themselves, a line of 32, or nothing; y_step from row to row.
// Those at `coming`, which are made next, are fetched meanwhile; after every block, meanwhile(block, blocks) does something
// else, since tiles are multiplied beside all other work.
struct Nothing {
    void operator()(long, long) const {}
};
template <int HIGH, typename Meanwhile = Nothing>
inline __attribute__((noinline)) void product(const uint32_t *x, const uint32_t *p, long many, float *y, long y_step,
                                              bool adds, const float *bias, const float *coming,
                                              Meanwhile meanwhile = Meanwhile()) {
    const long down = y_step * 4, from = adds ? down : 0;
    const float *begin = adds ? y : bias;
    if (begin) {
        TILE_LOAD(0, begin, from);
        TILE_LOAD(1, begin + SIDE, from);
        if (HIGH > 1) {
            TILE_LOAD(2, adds ? begin + SIDE * y_step : begin, from);
            TILE_LOAD(3, (adds ? begin + SIDE * y_step : begin) + SIDE, from);
        }
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    const long share = coming ? (HIGH * SIDE + many - 1) / many : 0;
    for (long k = 0; k < many; k++) {
        for (long r = k * share; r < (k + 1) * share && r < HIGH * SIDE; r++)
            __builtin_prefetch(coming + r * y_step, 1), __builtin_prefetch(coming + r * y_step + SIDE, 1);
        add_block<HIGH>(x + k * BLOCK, p + k * BLOCK);
        meanwhile(k, many);
    }
    TILE_STORE(0, y, down);
    TILE_STORE(1, y + SIDE, down);
    if (HIGH > 1) {
        TILE_STORE(2, y + SIDE * y_step, down);
        TILE_STORE(3, y + SIDE * y_step + SIDE, down);
    }
}

// The same for some rows and columns of these: others of y are left alone.
inline void product(const uint32_t *x, const uint32_t *p, long many, float *y, long y_step, long rows, long columns,
                    bool adds, const float *bias, const float *coming) {
    rows = rows < PAIR ? rows : PAIR;
    const auto run = rows > SIDE ? product<2, Nothing> : product<1, Nothing>;
    if (columns >= PAIR && (rows == SIDE || rows >= PAIR)) return run(x, p, many, y, y_step, adds, bias, coming, Nothing());
    float found[PAIR * PAIR];
    run(x, p, many, found, PAIR, false, 0, 0, Nothing());
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns && c < PAIR; c++) {
            const float one = found[r * PAIR + c];
            y[r * y_step + c] = adds ? y[r * y_step + c] + one : bias ? bias[c] + one : one;
        }
}

}  // namespace tiles
#endif
