// Storage types, exact widening, and the last rounding: element.rs.
#pragma once
#include "machine.cuh"

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};
typedef float fp32;

// The host names the types of the inputs and of the outputs, and the TF32 policy of matrix products.
#ifndef IN
#define IN bf16
#endif
#ifndef OUT
#define OUT bf16
#endif
#ifndef TF32
#define TF32 0
#endif
typedef IN In;
typedef OUT Out;

DEVICE float widen(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
DEVICE float widen(fp16 x) { return half_to_float(x.bits); }
DEVICE float widen(fp32 x) { return x; }

// To nearest even with gradual underflow; a NaN becomes the canonical one.
template <class T> DEVICE T narrow(float value);
template <> DEVICE bf16 narrow<bf16>(float value) {
    unsigned bits = __float_as_uint(value);
    unsigned rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return bf16{static_cast<unsigned short>(value != value ? 0x7FC0u : rounded)};
}
template <> DEVICE fp16 narrow<fp16>(float value) {
    return fp16{static_cast<unsigned short>(value != value ? 0x7E00 : float_to_half(value))};
}
template <> DEVICE fp32 narrow<fp32>(float value) { return value != value ? __uint_as_float(0x7FC00000u) : value; }

// An operand of a matrix product under the TF32 policy: only f32 has more than 10 bits of mantissa.
DEVICE float operand(bf16 x) { return widen(x); }
DEVICE float operand(fp16 x) { return widen(x); }
DEVICE float operand(fp32 x) {
    if (!TF32) return x;
    unsigned bits = __float_as_uint(x);
    return (bits & 0x7F800000u) == 0x7F800000u ? x : __uint_as_float((bits + 0x1000u) & ~0x1FFFu);
}

DEVICE float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Eight elements, widened.
struct Eight {
    float v[8];
};

// What 16 bytes of elements hold: 8 of bf16 and fp16, 4 of fp32.
template <class T> struct Pack {
    static const int COUNT = 16 / sizeof(T);
};

DEVICE void unpack(uint4 raw, bf16, float *v) {
    unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = low_half(words[i]);
        v[2 * i + 1] = high_half(words[i]);
    }
}
DEVICE void unpack(uint4 raw, fp16, float *v) {
    unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = half_to_float(static_cast<unsigned short>(words[i]));
        v[2 * i + 1] = half_to_float(static_cast<unsigned short>(words[i] >> 16));
    }
}
DEVICE void unpack(uint4 raw, fp32, float *v) {
    v[0] = __uint_as_float(raw.x);
    v[1] = __uint_as_float(raw.y);
    v[2] = __uint_as_float(raw.z);
    v[3] = __uint_as_float(raw.w);
}

// Eight elements as they are stored.
template <class T> struct Stored8 {
    uint4 raw[sizeof(T) / 2];
};

template <class T, class P> DEVICE Stored8<T> load_stored(P from) {
    Stored8<T> stored;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; i++) stored.raw[i] = load16(from + i * Pack<T>::COUNT);
    return stored;
}
template <class T, class P> DEVICE Stored8<T> load_stored_once(P from) {
    Stored8<T> stored;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; i++) stored.raw[i] = load16_once(from + i * Pack<T>::COUNT);
    return stored;
}
template <class T> DEVICE Eight widen_stored(const Stored8<T> &stored) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; i++) unpack(stored.raw[i], T(), eight.v + i * Pack<T>::COUNT);
    return eight;
}

// Eight elements from an aligned address.
template <class T, class P> DEVICE Eight load8(P from) { return widen_stored<T>(load_stored<T>(from)); }

// Up to eight elements, one by one; `pad` stands for the others.
template <class T, class P> DEVICE Eight load_some(P from, long long count, float pad) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float value = pad;
        if (i < count) value = widen(static_cast<T>(from[i]));
        eight.v[i] = value;
    }
    return eight;
}

DEVICE unsigned pair_of(unsigned short low, unsigned short high) {
    return static_cast<unsigned>(low) | (static_cast<unsigned>(high) << 16);
}

// Eight elements to an aligned address, with the last rounding.
template <class T, class P> DEVICE void store_eight(P to, const Eight &eight) {
    T out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = narrow<T>(eight.v[i]);
    if constexpr (sizeof(T) == 2) {
        store16(to, make_uint4(pair_of(out[0].bits, out[1].bits), pair_of(out[2].bits, out[3].bits),
                               pair_of(out[4].bits, out[5].bits), pair_of(out[6].bits, out[7].bits)));
    } else {
        store16(to, make_uint4(__float_as_uint(out[0]), __float_as_uint(out[1]), __float_as_uint(out[2]),
                               __float_as_uint(out[3])));
        store16(to + 4, make_uint4(__float_as_uint(out[4]), __float_as_uint(out[5]), __float_as_uint(out[6]),
                                   __float_as_uint(out[7])));
    }
}
template <class T, class P> DEVICE void store_some(P to, long long count, const Eight &eight) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < count) to[i] = narrow<T>(eight.v[i]);
    }
}
// The one or the other.
template <class T, class P> DEVICE void store_up_to8(P to, long long count, bool aligned, const Eight &eight) {
    if (aligned && count >= 8) {
        store_eight<T>(to, eight);
    } else {
        store_some<T>(to, count, eight);
    }
}
template <class T, class P> DEVICE Eight load_up_to8(P from, long long count, bool aligned, float pad) {
    if (aligned && count >= 8) return load8<T>(from);
    return load_some<T>(from, count, pad);
}
