/* Blocks of GGUF files to whole numbers and their scales: modelpool.checkpoint.block_values.
 * Source: ggml-common.h of ggml. */

#include <stdint.h>
#include <string.h>

/* By the names of ggml's types; as block_values.py counts them. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 };

static const int8_t OF_IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t OF_MXFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
enum { EXPONENT = 128, LEAST_EXPONENT = -24, MOST_EXPONENT = 15 }; /* of MXFP4; of a float16 */

/* Numbers of 4 bits: first the lower halves of `size` bytes. */
static void nibbles(const uint8_t *packed, int size, uint8_t *numbers) {
  for (int i = 0; i < size; i++) {
    numbers[i] = packed[i] & 15;
    numbers[size + i] = packed[i] >> 4;
  }
}

/* The fifth bits of 32 numbers: each bit of a byte to a byte of its own. */
static void fifths(const uint8_t *bits, uint8_t *numbers) {
  for (int i = 0; i < 4; i++) {
    const uint64_t ones = 0x0101010101010101;
    const uint64_t alone = bits[i] * ones & 0x8040201008040201;
    uint64_t eight;
    memcpy(&eight, numbers + i * 8, 8);
    eight |= ((alone + 0x7f * ones) >> 7 & ones) << 4;
    memcpy(numbers + i * 8, &eight, 8);
  }
}

static void looked_up(const int8_t *table, const uint8_t *packed, uint8_t *numbers) {
  nibbles(packed, 16, numbers);
  for (int i = 0; i < 32; i++) numbers[i] = (uint8_t)(table[numbers[i]] + 128);
}

/* Eight scales and eight centres of 6 bits: those of the first four groups, and around them the upper
 * bits of the others. */
static void of_groups(const uint8_t *packed, int8_t *scales, uint8_t *centres) {
  const uint8_t *first = packed, *second = packed + 4, *third = packed + 8;
  for (int i = 0; i < 4; i++) {
    scales[i] = first[i] & 63, centres[i] = second[i] & 63;
    scales[i + 4] = (third[i] & 15) | first[i] >> 6 << 4;
    centres[i + 4] = third[i] >> 4 | second[i] >> 6 << 4;
  }
}

static void q6_k(const uint8_t *block, uint8_t *numbers, int8_t *scales) {
  for (int half = 0; half < 2; half++) {
    const uint8_t *low = block + half * 64, *high = block + 128 + half * 32;
    for (int part = 0; part < 4; part++)
      for (int i = 0; i < 32; i++) {
        const int four = low[part % 2 * 32 + i] >> part / 2 * 4 & 15;
        numbers[half * 128 + part * 32 + i] = four | (high[i] >> part * 2 & 3) << 4;
      }
  }
  memcpy(scales, block + 192, 16);
}

static void iq4_xs(const uint8_t *block, uint8_t *numbers, int8_t *scales) {
  for (int group = 0; group < 8; group++) {
    const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
    const int high = block[2 + group / 4] >> group % 4 * 2 & 3;
    scales[group] = (int8_t)((low | high << 4) - 32);
    looked_up(OF_IQ4, block + 8 + group * 16, numbers + group * 32);
  }
}

static int mxfp4(const uint8_t *block, uint8_t *numbers, uint16_t *step) {
  const int exponent = block[0] - EXPONENT;
  if (exponent < LEAST_EXPONENT || exponent > MOST_EXPONENT) return 1;
  *step = exponent < -14 ? 1 << (exponent + 24) : (exponent + 15) << 10;
  looked_up(OF_MXFP4, block + 1, numbers);
  return 0;
}

static void half_at(const uint8_t *block, uint16_t sign, uint16_t *half) {
  memcpy(half, block, 2);
  *half ^= sign;
}

/* `count` blocks of so many bytes, one behind the other, to `width` numbers each, and to as many of
 * the others as the type has. Returns 0; 1 where a scale is no float16. */
int sr_unblock(int type, int bytes, int width, const uint8_t *blocks, int64_t count, uint8_t *numbers,
               uint16_t *steps, uint16_t *bases, int8_t *scales, uint8_t *centres) {
  static const uint16_t negative = 0x8000; /* what these types call a minimum is added */
  for (int64_t n = 0; n < count; n++, blocks += bytes, numbers += width) {
    if (type != MXFP4) half_at(blocks + (type == Q6_K ? 208 : 0), 0, steps + n);
    switch (type) {
      case Q4_0: nibbles(blocks + 2, 16, numbers); break;
      case Q4_1:
        half_at(blocks + 2, negative, bases + n);
        nibbles(blocks + 4, 16, numbers);
        break;
      case Q5_0:
        nibbles(blocks + 6, 16, numbers);
        fifths(blocks + 2, numbers);
        break;
      case Q5_1:
        half_at(blocks + 2, negative, bases + n);
        nibbles(blocks + 8, 16, numbers);
        fifths(blocks + 4, numbers);
        break;
      case Q8_0:
        for (int i = 0; i < 32; i++) numbers[i] = blocks[2 + i] ^ 128;
        break;
      case Q4_K:
      case Q5_K:
        half_at(blocks + 2, 0, bases + n);
        of_groups(blocks + 4, scales + n * 8, centres + n * 8);
        for (int pair = 0; pair < 4; pair++)
          nibbles(blocks + (type == Q4_K ? 16 : 48) + pair * 32, 32, numbers + pair * 64);
        for (int group = 0; group < 8 && type == Q5_K; group++)
          for (int i = 0; i < 32; i++)
            numbers[group * 32 + i] |= (blocks[16 + i] >> group & 1) << 4;
        break;
      case Q6_K: q6_k(blocks, numbers, scales + n * 16); break;
      case IQ4_NL: looked_up(OF_IQ4, blocks + 2, numbers); break;
      case IQ4_XS: iq4_xs(blocks, numbers, scales + n * 8); break;
      case MXFP4:
        if (mxfp4(blocks, numbers, steps + n)) return 1;
        break;
    }
  }
  return 0;
}
