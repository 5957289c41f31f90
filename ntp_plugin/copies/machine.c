/* The sums of digest.py, by whatever vector instructions the processor has, copying, and folding into a parity;
   `machine.py` says when these are used.

   All parts of a state come in one call. They are many and small, and a call from Python takes as long as to read some
   ten thousand words. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64 /* bytes of a processor's cache */

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
    uint64_t value;
} Rectangle;

typedef struct {
    uint64_t sum;
    uint64_t largest; /* of the words, but for their highest bits: it tells whether any is no finite number */
} Found;

/* A word has 64 bits once its sign is extended, and then what overflows is the same with a sign and without. */
#define SUM_OF(NAME, WORD, BITS, LOWER_BITS)                                                                           \
    ON_ANY_PROCESSOR static void NAME(const Rectangle *one, Found *found)                                              \
    {                                                                                                                  \
        const WORD *words = one->words;                                                                                \
        BITS largest = 0;                                                                                              \
        for (uint64_t page = 0; page < one->pages_count; page++, words += one->keys_count) {                           \
            uint64_t sum = 0;                                                                                          \
            for (uint64_t place = 0; place < one->keys_count; place++) {                                               \
                BITS lower = (BITS)words[place] & LOWER_BITS;                                                          \
                largest = lower > largest ? lower : largest;                                                           \
                sum += (uint64_t)(int64_t)words[place] * one->keys[place];                                             \
            }                                                                                                          \
            found->sum += sum * one->pages[page];                                                                      \
        }                                                                                                              \
        if (largest > found->largest)                                                                                  \
            found->largest = largest;                                                                                  \
    }

SUM_OF(sum_of_8, uint8_t, uint8_t, 0x7f)
SUM_OF(sum_of_16, int16_t, uint16_t, 0x7fff)
SUM_OF(sum_of_32, int32_t, uint32_t, 0x7fffffff)

/* Of words of `width` bytes. What was `found` before is added to. */
void ntp_sums(const Rectangle *all, uint64_t count, uint64_t width, Found *found)
{
    for (uint64_t number = 0; number < count; number++) {
        const Rectangle *one = &all[number];
        (width == 1 ? sum_of_8 : width == 2 ? sum_of_16 : sum_of_32)(one, &found[one->value]);
    }
}

typedef struct {
    void *to;
    const void *from;
    uint64_t bytes;
} Bytes;

/* Past the caches, which belong to the training: nobody reads a copy soon. */
static void copy_one(const Bytes *one)
{
    uint64_t done = 0;
#ifdef __SSE2__
    char *to = one->to;
    const char *from = one->from;
    if ((uintptr_t)to % LINE == 0)
        for (; done + LINE <= one->bytes; done += LINE)
            for (uint64_t part = 0; part < LINE; part += sizeof(__m128i))
                _mm_stream_si128((__m128i *)(to + done + part), _mm_loadu_si128((const __m128i *)(from + done + part)));
    _mm_sfence();
#endif
    memcpy((char *)one->to + done, (const char *)one->from + done, one->bytes - done);
}

void ntp_copy(const Bytes *all, uint64_t count)
{
    for (uint64_t number = 0; number < count; number++)
        copy_one(&all[number]);
}

ON_ANY_PROCESSOR static void fold_one(const Bytes *one)
{
    unsigned char *restrict to = one->to;
    const unsigned char *restrict from = one->from;
    uint64_t bytes = one->bytes; /* which a write to bytes might change, for all that a compiler knows */
    for (uint64_t place = 0; place < bytes; place++)
        to[place] ^= from[place];
}

void ntp_fold(const Bytes *all, uint64_t count)
{
    for (uint64_t number = 0; number < count; number++)
        fold_one(&all[number]);
}
