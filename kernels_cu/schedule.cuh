// Which piece of the problem a CTA takes: everything lies in grid.x, so no launch limit shows. No memory is touched.
#pragma once
#include "ptx.cuh"

struct Block {
  int index;  // query or key block
  int batch, head;
};

// CTA -> (block, batch, head). Heads (batch-major) are taken in sections of `section`, whose keys and values fit in L2
// together; inside a section all heads' first blocks come first. `reversed`: the last block is the heaviest and leads.
DEVICE Block find_block(u32 cta, int blocks, int heads, int batches, int section, bool reversed) {
  const u32 all = (u32)heads * (u32)batches;
  const u32 number = cta / ((u32)section * (u32)blocks);
  const u32 rest = cta - number * ((u32)section * (u32)blocks);
  const u32 size = min((u32)section, all - number * (u32)section);  // the last section may be smaller
  const u32 index = rest / size;
  const u32 batch_head = number * (u32)section + (rest - index * size);
  const u32 batch = batch_head / (u32)heads;
  return {reversed ? blocks - 1 - (int)index : (int)index, (int)batch, (int)(batch_head - batch * (u32)heads)};
}
