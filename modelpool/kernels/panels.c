/* Lays numbers of 4 to 8 bits out as the kernels read them: see `Weight` of linear.c. */

#include <stdint.h>
#include <string.h>

enum { GROUP = 32, OUTPUTS = 32, INPUTS = 64 };

/* The least bits of 64 bytes, a bit each. */
static void pack_bits(const uint8_t *numbers, int bit, uint8_t *packed) {
  for (int i = 0; i < 8; i++) {
    uint64_t eight;
    memcpy(&eight, numbers + i * 8, 8);
    packed[i] = (eight >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56;
  }
}

/* Group `group` of panel `panel`: 32 inputs of 32 outputs. What is missing at the end is 0. */
static void pack_group(const uint8_t *numbers, int64_t outputs, int64_t given, int bits,
                       int64_t panel, int64_t group, int64_t groups, uint8_t *low, uint8_t *fifths,
                       uint8_t *sixths) {
  uint8_t rows[OUTPUTS][GROUP] = {{0}}, lanes[2][64];
  const int64_t left = outputs - panel * OUTPUTS, behind = given - group * GROUP;
  const int64_t count = left < OUTPUTS ? left : OUTPUTS, size = behind < GROUP ? behind : GROUP;
  for (int64_t i = 0; i < count && size > 0; i++)
    memcpy(rows[i], numbers + (panel * OUTPUTS + i) * given + group * GROUP, size);
  for (int half = 0; half < 2; half++)
    for (int step = 0; step < 4; step++) {
      for (int late = 0; late < 2; late++)
        for (int i = 0; i < 16; i++)
          memcpy(lanes[late] + i * 4, rows[half * 16 + i] + step * 8 + late * 4, 4);
      if (bits == 8) {
        memcpy(low + ((panel * 2 + half) * groups + group) * 512 + step * 128, lanes, 128);
        continue;
      }
      const int64_t vector = ((panel * groups + group) * 2 + half) * 4 + step;
      for (int i = 0; i < 64; i++)
        low[vector * 64 + i] = (lanes[0][i] & 15) | (uint8_t)(lanes[1][i] << 4);
      for (int late = 0; late < 2; late++) {
        if (bits > 4) pack_bits(lanes[late], 4, fifths + vector * 16 + late * 8);
        if (bits > 5) pack_bits(lanes[late], 5, sixths + vector * 16 + late * 8);
      }
    }
}

/* numbers [outputs][given], of 4, 5, 6 or 8 bits, to whole panels: `low` are nibbles, or bytes. */
void sr_pack(const uint8_t *numbers, int64_t outputs, int64_t given, int bits, uint8_t *low,
             uint8_t *fifths, uint8_t *sixths) {
  const int64_t panels = (outputs + OUTPUTS - 1) / OUTPUTS;
  const int64_t groups = (given + INPUTS - 1) / INPUTS * (INPUTS / GROUP);
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t group = 0; group < groups; group++)
      pack_group(numbers, outputs, given, bits, panel, group, groups, low, fifths, sixths);
}
