// The argument block of every kernel: 64-bit words in the order of cuattn/params.py (tests compare the two).
// Strides count elements; an operand that a call does not have is a null pointer. Declarations only.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define OFFSET_VALUE 0
#define OFFSET_ARRAY 1
#define OFFSET_BOTTOM_RIGHT 2

struct Params {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;
  const void* dout;
  const void* dlse;
  void* dq;
  void* dk;
  void* dv;
  void* delta;
  float* dq_accum;
  float* dk_accum;
  float* dv_accum;
  const void* bias;
  void* dbias;
  const u8* mask;
  const void* alibi_slopes;
  const void* sinks;
  void* dsinks;
  const int* q_segment_ids;
  const int* kv_segment_ids;
  const int* q_seqlens;
  const int* kv_seqlens;
  const int* q_offset;
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const i64* dropout_seed;
  const float* softmax_scale;
  u32* live_tiles;
  int* semaphore;
  void* scratch;
  i64 q_stride_b;
  i64 q_stride_h;
  i64 q_stride_s;
  i64 k_stride_b;
  i64 k_stride_h;
  i64 k_stride_s;
  i64 v_stride_b;
  i64 v_stride_h;
  i64 v_stride_s;
  i64 out_stride_b;
  i64 out_stride_h;
  i64 out_stride_s;
  i64 dout_stride_b;
  i64 dout_stride_h;
  i64 dout_stride_s;
  i64 dq_stride_b;
  i64 dq_stride_h;
  i64 dq_stride_s;
  i64 dk_stride_b;
  i64 dk_stride_h;
  i64 dk_stride_s;
  i64 dv_stride_b;
  i64 dv_stride_h;
  i64 dv_stride_s;
  i64 bias_stride_b;
  i64 bias_stride_h;
  i64 bias_stride_q;
  i64 bias_stride_k;
  i64 dbias_stride_b;
  i64 dbias_stride_h;
  i64 dbias_stride_q;
  i64 dbias_stride_k;
  i64 mask_stride_b;
  i64 mask_stride_h;
  i64 mask_stride_q;
  i64 mask_stride_k;
  i64 lse_stride_b;
  i64 lse_stride_h;
  i64 alibi_slopes_stride_b;
  i64 batch;
  i64 heads_q;
  i64 heads_kv;
  i64 seqlen_q;
  i64 seqlen_kv;
  i64 head_dim;
  i64 head_dim_v;
  i64 window_left;
  i64 window_right;
  i64 q_offset_mode;
  i64 q_offset_value;
  i64 dropout_seed_value;
  i64 dropout_threshold;
  i64 aux0;
  i64 aux1;
  i64 aux2;
  i64 aux3;
  i64 aux4;
  i64 aux5;
  i64 aux6;
  i64 aux7;
  double softmax_scale_value;
  double softcap;
  double dropout_scale;
};

static_assert(sizeof(Params) == 8 * 95, "params.py and params.cuh disagree");
