// From stored scores (mask.cuh) to softmax weights and back to LSE, in float32 or float64, one number at a time.
//
// Weights are powers of two. Without TRANSFORM an *exponent* is a score times unit * log2(e), so that a weight is one FMA
// and one power; with it scores are in natural units and are subtracted first, since finfo.min as a bias must not overflow.
#pragma once
#include "mask.cuh"
#include "wide.cuh"

DEVICE Accum exponent(Accum score, Accum factor) { return TRANSFORM ? score : score * factor; }

// 2^(score's exponent - subtrahend).
DEVICE Accum weight(Accum score, Accum subtrahend, Accum factor) {
  return exp2_fast(TRANSFORM ? (score - subtrahend) * factor : fused(score, factor, -subtrahend));
}

// 2^(a - b) of two exponents.
DEVICE Accum exp_difference(Accum a, Accum b) { return exp2_fast(TRANSFORM ? (a - b) * (Accum)LOG2E : a - b); }

// The exponent that belongs to a natural logarithm, and the reverse.
DEVICE Accum exponent_of_log(Accum x) { return TRANSFORM ? x : x * (Accum)LOG2E; }
DEVICE Accum log_of_exponent(Accum x) { return TRANSFORM ? x : x * (Accum)LN2; }

struct Visible {
  DEVICE bool operator()(Accum score) const { return score != -(Accum)infinity(); }
};

// A row's maximum (exponent) and sum, the sink (natural units, or null) joining both: its natural-log LSE, and what its
// accumulator is to be multiplied with. The row sees something.
DEVICE Accum finish_row(Accum top, Accum sum, const Accum* sink, Accum& factor) {
  Accum weight_of_row = 1;
  if (sink) {
    const Accum sink_exponent = exponent_of_log(*sink), joint = max(top, sink_exponent);
    weight_of_row = exp_difference(top, joint);
    sum = sum * weight_of_row + exp_difference(sink_exponent, joint);
    top = joint;
  }
  factor = weight_of_row / sum;
  return log_of_exponent(top) + log(sum);
}
