/* Buffers for records that nobody reads; left_behind.py calls the rest of the agent's exporter/agent/cupti.c itself. */
#include <stdlib.h>
#include <time.h>

#include "cupti.h"

enum { SIZE = 1 << 20 };

static void requested(uint8_t **buffer, size_t *size, size_t *most_records)
{
    *buffer = malloc(SIZE);
    *size = SIZE;
    *most_records = 0;
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size, (void)valid;
    free(buffer);
}

uint64_t realtime_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Finds the CUPTI that the program has loaded, and registers with it; 0, or why not. */
int attach(void)
{
    enum agent_reason reason = cuda_load();
    reason = reason ? reason : cupti_load("", true);
    return reason ? (int)reason : cupti_register(requested, completed);
}
