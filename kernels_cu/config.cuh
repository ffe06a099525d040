// What a kernel is compiled for: element types from DTYPE, every feature switch with its default, and their checks.
// No code runs here.
#pragma once
#include "params.cuh"

#define F16 0
#define BF16 1
#define F32 2
#define F64 3

#ifndef DTYPE
#define DTYPE BF16
#endif
#ifndef ALIGNED  // rows of every operand start on 16 bytes
#define ALIGNED 1
#endif
#ifndef ANY_SCALE  // softmax_scale may be negative: its sign is tested at run time
#define ANY_SCALE 1
#endif
#ifndef HAS_LEFT  // the window's two sides; causal is HAS_RIGHT
#define HAS_LEFT 0
#endif
#ifndef HAS_RIGHT
#define HAS_RIGHT 0
#endif
#ifndef VARIABLE  // lengths or offsets read from arrays
#define VARIABLE 0
#endif
#ifndef VARLEN  // packed sequences
#define VARLEN 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef BIAS  // 1: of DTYPE, 2: float32
#define BIAS 0
#endif
#ifndef MASK
#define MASK 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef SEGMENTS
#define SEGMENTS 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif

// A score that is more than scale * q.k before the masks: it is then kept in natural units.
#define TRANSFORM (SOFTCAP || BIAS || ALIBI)
// A bias of finfo.min overflows as a score times log2(e): such scores are subtracted first. A half cannot be so large.
#define SUBTRACT_FIRST (BIAS == 2 || (BIAS && DTYPE != F16))
// A key in a visited tile may be hidden from every row, wherever it lies.
#define SCATTERED (MASK || SEGMENTS || BIAS)

#if DTYPE == F64
typedef double Element;
typedef double Accum;
#elif DTYPE == F32
typedef float Element;
typedef float Accum;
#else
typedef u16 Element;  // the bits of a half or a bfloat16
typedef float Accum;
#endif

#if BIAS == 2
typedef float BiasElement;
#else
typedef Element BiasElement;
#endif

static_assert(DTYPE >= F16 && DTYPE <= F64, "DTYPE is 0 .. 3");
static_assert(BIAS >= 0 && BIAS <= 2, "BIAS is 0 .. 2");
static_assert(!VARLEN || VARIABLE, "packed sequences have variable lengths");
