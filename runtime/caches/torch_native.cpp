// New tokens written to their places in a cache, in one pass: those of few queries cost more in operations of torch
// than in work. The same bits as torch_plain.py.

#include <math.h>
#include <stdint.h>
#include <string.h>

struct Array {  // of k or v
    const char *given;
    int64_t batch, head, token;  // strides of what is given, in entries; those of a vector are neighbours
    int64_t dim;
    char *held;  // [rows, heads, room, dim]
    float *scale;  // [rows, heads, room]; 0: what is given is held as it is
};

struct Append {  // words of torch_plain.py, in this order
    int64_t batch, heads, given, rows, room, ring, width;  // ring: the last places of a row, which tokens share in turn
    const int32_t *lengths, *counts, *pages;  // counts 0: all are real; pages [batch, width], 0: a row of its own
    int64_t from, to, bytes;  // which dtypes, by their number below; of an entry of what is given
    Array arrays[2];
};

static int64_t real(const Append &a, int64_t b) { return a.counts ? a.counts[b] : a.given; }

// The row and the token in it of new token i; false: there is no such place.
static bool place(const Append &a, int64_t b, int64_t i, int64_t *row, int64_t *token) {
    const int64_t at = int64_t(a.lengths[b]) + i;
    if (at < 0 || (a.pages && at / a.room >= a.width)) return false;
    *row = a.pages ? a.pages[b * a.width + at / a.room] : b;
    const int64_t first = a.room - a.ring;  // tokens that stay
    *token = a.pages ? at % a.room : a.ring && at >= first ? first + (at - first) % a.ring : at;
    return *row >= 0 && *row < a.rows && *token < a.room;
}

static float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits(float x) {
    uint32_t found;
    memcpy(&found, &x, sizeof found);
    return found;
}

struct Float32 {
    typedef float Entry;
    static float load(float x) { return x; }
};

struct Float16 {
    typedef uint16_t Entry;
    static float load(uint16_t x) {
        const uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
        const bool finite = magnitude < 0x0f800000;
        const uint32_t found = finite ? bits(number(magnitude) * 0x1p112f) : magnitude | 0x7f800000;
        return number(found | sign);
    }
};

struct Bfloat16 {
    typedef uint16_t Entry;
    static float load(uint16_t x) { return number(uint32_t(x) << 16); }
};

struct Int8 {
    static float largest() { return 127; }
    static int8_t store(float x) { return x == x ? int8_t(rintf(x)) : 0; }
};

// To the nearest, ties to even. Nothing is larger than the largest: what is stored has been divided by its scale.
template <int MANTISSA, int BIAS, int LARGEST> struct Float8 {
    static float largest() { return LARGEST; }
    static uint8_t store(float x) {
        const int drop = 23 - MANTISSA;
        const uint32_t all = bits(x), magnitude = all & 0x7fffffff;
        const uint32_t rounded = (magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop;
        const uint32_t normal = rounded - ((127 - BIAS) << MANTISSA);
        const float steps = fminf(number(magnitude), 1) * number((126 + BIAS + MANTISSA) << 23);
        const uint32_t small = uint32_t(int32_t(rintf(steps)));
        const uint32_t found = magnitude < uint32_t(128 - BIAS) << 23 ? small : normal;
        return uint8_t((magnitude > 0x7f800000 ? 0x7f : found) | (all >> 24 & 0x80));
    }
};

template <typename From, typename To> static void quantise(const char *given, char *held, float *scale, int64_t dim) {
    const typename From::Entry *x = (const typename From::Entry *)given;
    uint32_t most = 0;  // magnitudes are in the order of their bits, NaN behind all others
    for (int64_t d = 0; d < dim; d++) {
        const uint32_t magnitude = bits(From::load(x[d])) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    const float found = *scale = number(most) / To::largest(), least = 0x1p-126f, by = found < least ? least : found;
    for (int64_t d = 0; d < dim; d++) held[d] = char(To::store(From::load(x[d]) / by));
}

typedef void Quantise(const char *, char *, float *, int64_t);
typedef Float8<3, 7, 448> E4M3;
typedef Float8<2, 15, 57344> E5M2;
static Quantise *const QUANTISE[3][3] = {
    {quantise<Float32, Int8>, quantise<Float32, E4M3>, quantise<Float32, E5M2>},
    {quantise<Float16, Int8>, quantise<Float16, E4M3>, quantise<Float16, E5M2>},
    {quantise<Bfloat16, Int8>, quantise<Bfloat16, E4M3>, quantise<Bfloat16, E5M2>},
};

// Whether there is a place for each of them; otherwise nothing is written.
extern "C" int64_t frisket_append(const Append *call) {
    const Append &a = *call;
    int64_t row, token;
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t i = 0; i < real(a, b); i++)
            if (!place(a, b, i, &row, &token)) return 0;
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t i = 0; i < real(a, b); i++) {  // in a ring the last stay
            place(a, b, i, &row, &token);
            for (int64_t h = 0; h < a.heads; h++)
                for (const Array &x : a.arrays) {
                    const int64_t at = (row * a.heads + h) * a.room + token;
                    const char *given = x.given + (b * x.batch + h * x.head + i * x.token) * a.bytes;
                    if (x.scale)
                        QUANTISE[a.from][a.to](given, x.held + at * x.dim, x.scale + at, x.dim);
                    else
                        memcpy(x.held + at * x.dim * a.bytes, given, x.dim * a.bytes);
                }
        }
    return 1;
}
