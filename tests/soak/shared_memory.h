/* Puts the fake driver's own memory into shared pages, so that the kernel counts it apart from the exporter's.
 *
 * The fake keeps every scenario that was ever replaced, since a thread may still read it: a tenth of a MiB for each
 * rewrite, of which a soak has thousands. As RssShmem of /proc/PID/status it does not hide what the exporter does.
 * Included before each of its sources. What is given back is used again where it was the last or is asked for alike. */
#ifndef SOAK_SHARED_MEMORY_H
#define SOAK_SHARED_MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SHARED_ALIGNMENT = 16, SHARED_CHUNK = 1 << 20 };

typedef struct { size_t size; } __attribute__((aligned(16))) SharedHead;

static _Thread_local char *shared_place, *shared_end;
static _Thread_local SharedHead *shared_spare;

static inline size_t shared_rounded(size_t size)
{
    return (size + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
}

static inline void *shared_malloc(size_t size)
{
    size = shared_rounded(size);
    if (shared_spare && shared_spare->size == size) {
        void *again = shared_spare + 1;
        shared_spare = NULL;
        return again;
    }
    if ((size_t)(shared_end - shared_place) < size + sizeof(SharedHead)) {
        size_t chunk = size + sizeof(SharedHead) > SHARED_CHUNK ? size + sizeof(SharedHead) : SHARED_CHUNK;
        char *more = mmap(NULL, chunk, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (more == MAP_FAILED)
            return NULL;
        shared_place = more;
        shared_end = more + chunk;
    }
    SharedHead *head = (SharedHead *)(void *)shared_place;
    head->size = size;
    shared_place += sizeof *head + size;
    return head + 1;
}

static inline void *shared_calloc(size_t count, size_t size)
{
    void *all = shared_malloc(count * size);
    return all ? memset(all, 0, count * size) : NULL;
}

static inline void shared_free(void *old)
{
    if (old)
        shared_spare = (SharedHead *)old - 1;
}

static inline void *shared_realloc(void *old, size_t size)
{
    SharedHead *head = old ? (SharedHead *)old - 1 : NULL;
    size_t more = shared_rounded(size);
    if (head && more <= head->size)
        return old;
    if (head && (char *)old + head->size == shared_place && (size_t)(shared_end - (char *)old) >= more) {
        shared_place = (char *)old + more;
        head->size = more;
        return old;
    }
    void *other = shared_malloc(size);
    return other && head ? memcpy(other, old, head->size) : other;
}

static inline char *shared_strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = shared_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

#undef strdup
#define malloc shared_malloc
#define calloc shared_calloc
#define realloc shared_realloc
#define strdup shared_strdup
#define free shared_free

#endif
