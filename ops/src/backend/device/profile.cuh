// What fixes the bits of the profile `ieee`: made of ops/src/profile.rs by
// SAMEBITS_RECORD=1 cargo test --workspace --lib profile
#pragma once

// Lanes of a `lanes` sum.
#define LANES 256
// Segments of a long sum.
#define SEGMENTS 8
// A segment is a multiple of this.
#define SEGMENT_STEP 16
// Keys of a block of attention.
#define KEYS 256
// Chains of a sum over tokens.
#define CHAINS 64
// Channels of a block in the gradient of a selective scan.
#define CHANNELS 64
// Weights more than this many powers of two below the largest are +0.
#define NEGLIGIBLE -100.0f
// From |n| of this size on the log-probabilities and the entropy of a row are measured from its top.
#define FAR 65536.0f
// From this size on, x * log2(e) has no fraction.
#define NO_FRACTION 4194304.0f
// Exponents beyond this are infinite or +0 either way.
#define MOST_SCALED 252.0f
// log2(e) in two parts.
#define LOG2E_HI __uint_as_float(0x3FB8AA3Bu)
#define LOG2E_LO __uint_as_float(0x32A57060u)
// The natural logarithm of 2.
#define LN_2 __longlong_as_double(0x3FE62E42FEFA39EFll)
// Coefficients of 2^f by their powers; that of power 0 is 1.
#define EXP2_6 __uint_as_float(0x3920B5B7u)
#define EXP2_5 __uint_as_float(0x3AAF841Au)
#define EXP2_4 __uint_as_float(0x3C1D96F0u)
#define EXP2_3 __uint_as_float(0x3D6357BEu)
#define EXP2_2 __uint_as_float(0x3E75FDEEu)
#define EXP2_1 __uint_as_float(0x3F317218u)
// The highest odd denominator of the series of the logarithm.
#define LN_TERMS 21
// From this z on the logarithm halves it.
#define LN_HALF __longlong_as_double(0x3FF6A09E60000000ll)
// f32(2 sqrt(2/pi)) and f32(0.044715).
#define GELU_SCALE __uint_as_float(0x3FCC422Au)
#define GELU_CUBE __uint_as_float(0x3D372713u)
// Coefficients of the tail of a normal distribution by their powers.
#define NORMAL_TAIL_9 __uint_as_float(0x3CFADFC0u)
#define NORMAL_TAIL_8 __uint_as_float(0xBE12BD2Du)
#define NORMAL_TAIL_7 __uint_as_float(0x3E5D21A8u)
#define NORMAL_TAIL_6 __uint_as_float(0xBDEA0E03u)
#define NORMAL_TAIL_5 __uint_as_float(0x3E0BD4BAu)
#define NORMAL_TAIL_4 __uint_as_float(0x3D796D91u)
#define NORMAL_TAIL_3 __uint_as_float(0x3DD20858u)
#define NORMAL_TAIL_2 __uint_as_float(0x3DD7961Du)
#define NORMAL_TAIL_1 __uint_as_float(0x3DD88E6Bu)
// How fast 1 / (1 + step |x|) falls, whose powers they are of.
#define NORMAL_STEP __uint_as_float(0x3E87AE14u)
// f32(1 / sqrt(2 pi)).
#define NORMAL_DENSITY __uint_as_float(0x3ECC422Au)
// What is added to the sum of sigmoids that weights of experts are divided by.
#define ROUTE_SUM __uint_as_float(0x1E3CE508u)
