/* Makes the sums of digest.py with the processor's vector instructions, copies what is summed, and folds bytes into a
   parity; `machine.py` says when these are used.

   One call covers all parts of a state. They are many and small, and a call from Python takes as long as to read some
   ten thousand words. A page is copied right after its sum was made, so that it is read from memory once. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64 /* bytes of a processor's cache */
#define BLOCK 128 /* words */
#define AHEAD 8192 /* Bytes to prefetch ahead. A processor detects by itself that words are read one after the other, but
                      not beyond a page of memory, and keys are read beside them. */

#if defined(__x86_64__) && defined(__linux__)
#define ON_ANY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ON_ANY_PROCESSOR
#endif

/* Pages in which a part has the same places, in the value with that number. */
typedef struct {
    const void *words;
    const uint64_t *keys, *pages;
    uint64_t keys_count, pages_count;
    uint64_t width; /* bytes of a word */
    uint64_t value;
    void *to; /* where the words are copied, if anywhere */
} Rectangle;

typedef struct {
    uint64_t sum;
    uint64_t largest; /* of the words, but for their highest bits: it shows whether any number is not finite */
} Found;

/* Writes past the caches, which belong to the training: nobody reads a copy soon. The caller must wait for the writes
   in the end, so that other threads see them. */
static void copy(void *to, const void *from, uint64_t bytes)
{
    uint64_t done = 0;
#ifdef __SSE2__
    uint64_t before_a_line = -(uintptr_t)to % LINE;
    if (bytes >= before_a_line + LINE) {
        memcpy(to, from, before_a_line);
        for (done = before_a_line; done + LINE <= bytes; done += LINE)
            for (uint64_t at = done; at < done + LINE; at += sizeof(__m128i))
                _mm_stream_si128((__m128i *)((char *)to + at), _mm_loadu_si128((const __m128i *)((const char *)from + at)));
    }
#endif
    memcpy((char *)to + done, (const char *)from + done, bytes - done);
}

static void wait_for_writes(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* A word has 64 bits once its sign is extended; then it overflows in the same way with a sign and without. */
#define SUM_OF(NAME, WORD, BITS, LOWER_BITS)                                                                           \
    ON_ANY_PROCESSOR static void NAME(const Rectangle *one, Found *found)                                              \
    {                                                                                                                  \
        const WORD *words = one->words;                                                                                \
        WORD *to = one->to;                                                                                            \
        BITS largest = 0;                                                                                              \
        for (uint64_t page = 0; page < one->pages_count; page++, words += one->keys_count) {                           \
            uint64_t sum = 0;                                                                                          \
            for (uint64_t begin = 0; begin < one->keys_count; begin += BLOCK) {                                        \
                uint64_t end = begin + BLOCK < one->keys_count ? begin + BLOCK : one->keys_count;                      \
                for (const char *at = (const char *)&words[begin]; at < (const char *)&words[end]; at += LINE)         \
                    __builtin_prefetch(at + AHEAD);                                                                    \
                for (uint64_t place = begin; place < end; place++) {                                                   \
                    BITS lower = (BITS)words[place] & LOWER_BITS;                                                      \
                    largest = lower > largest ? lower : largest;                                                       \
                    sum += (uint64_t)(int64_t)words[place] * one->keys[place];                                         \
                }                                                                                                      \
            }                                                                                                          \
            found->sum += sum * one->pages[page];                                                                      \
            if (to) {                                                                                                  \
                copy(to, words, one->keys_count * sizeof(WORD));                                                       \
                to += one->keys_count;                                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        if (largest > found->largest)                                                                                  \
            found->largest = largest;                                                                                  \
    }

SUM_OF(sum_of_8, uint8_t, uint8_t, 0x7f)
SUM_OF(sum_of_16, int16_t, uint16_t, 0x7fff)
SUM_OF(sum_of_32, int32_t, uint32_t, 0x7fffffff)

/* Adds to what was `found` before. A change of the arguments needs a new name, so that a library that was built before
   is not called. */
void ntp_sum_and_copy(const Rectangle *all, uint64_t count, Found *found)
{
    for (uint64_t number = 0; number < count; number++) {
        const Rectangle *one = &all[number];
        (one->width == 1 ? sum_of_8 : one->width == 2 ? sum_of_16 : sum_of_32)(one, &found[one->value]);
    }
    wait_for_writes();
}

typedef struct {
    void *to;
    const void *from;
    uint64_t bytes;
} Bytes;

ON_ANY_PROCESSOR static void fold_one(const Bytes *one)
{
    unsigned char *restrict to = one->to;
    const unsigned char *restrict from = one->from;
    uint64_t bytes = one->bytes; /* a compiler must assume that a write to bytes changes one->bytes */
    for (uint64_t place = 0; place < bytes; place++)
        to[place] ^= from[place];
}

void ntp_fold(const Bytes *all, uint64_t count)
{
    for (uint64_t number = 0; number < count; number++)
        fold_one(&all[number]);
}
