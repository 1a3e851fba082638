/* CUPTI's activity API and the few calls of the CUDA driver that we make, by dlsym.
 *
 * An own mirror of what is used: NVIDIA's headers are proprietary. The places of the fields are equal in all versions
 * from CUDA 9 to 13.4 (tests/agent/test_abi.py compiles NVIDIA's headers and compares). Records are read by prefix:
 * CUPTI itself steps from one to the next. */
#ifndef GPU_HPC_AGENT_CUPTI_H
#define GPU_HPC_AGENT_CUPTI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

/* CUptiResult */
enum {
    CUPTI_OK = 0,
    CUPTI_SUBSCRIBER_TAKEN = 39, /* CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED */
    CUPTI_QUITTING = -1,         /* ours: the process exits, nothing was called */
};
/* CUpti_ActivityKind */
enum {
    KIND_MEMCPY = 1,
    KIND_MEMSET = 2,
    KIND_DRIVER = 4,
    KIND_RUNTIME = 5,
    KIND_CONCURRENT_KERNEL = 10,
    KIND_MEMCPY2 = 22,
    KIND_SYNCHRONIZATION = 38,
};
/* CUpti_ActivityMemcpyKind */
enum {
    MEMCPY_HTOD = 1,
    MEMCPY_DTOH = 2,
    MEMCPY_HTOA = 3,
    MEMCPY_ATOH = 4,
    MEMCPY_ATOA = 5,
    MEMCPY_ATOD = 6,
    MEMCPY_DTOA = 7,
    MEMCPY_DTOD = 8,
    MEMCPY_PTOP = 10,
};
enum { MEMORY_KIND_PINNED = 2 };   /* CUpti_ActivityMemoryKind */
enum { FLUSH_FORCED = 1 };         /* CUpti_ActivityFlag */
enum { ATTRIBUTE_HOST_PINNED = 8 }; /* CUpti_ActivityAttribute: profiling data in pinned host memory */

/* Versions as cuptiGetVersion tells them. */
enum {
    CUPTI_12_0 = 18,    /* the oldest whose records were compared */
    CUPTI_12_5 = 23,    /* records of single API functions */
    CUPTI_12_9 = 28,    /* a refused buffer (NULL) is no crash */
    CUPTI_13_0_1 = 130001, /* graphs: no crash with profiling data on the device, no invalid times after 25 M nodes */
    CUPTI_13_1_1 = 130101, /* graph launches have the correlation ids of their nodes */
    CUPTI_NEWEST = 130499,
};

/* Offsets of fields in records. */
enum {
    KERNEL_START = 16, KERNEL_END = 24, KERNEL_DEVICE = 40, KERNEL_CONTEXT = 44, KERNEL_STREAM = 48,
    KERNEL_GRID = 52, KERNEL_BLOCK = 64, KERNEL_CORRELATION = 92, KERNEL_NAME = 104, KERNEL_GRAPH_NODE = 144,
    KERNEL_NEEDS = 160,

    MEMCPY_COPY_KIND = 4, MEMCPY_SOURCE = 5, MEMCPY_DESTINATION = 6, MEMCPY_BYTES = 8, MEMCPY_START = 16,
    MEMCPY_END = 24, MEMCPY_DEVICE = 32, MEMCPY_CORRELATION = 44, MEMCPY_GRAPH_NODE = 64, MEMCPY_NEEDS = 72,

    MEMCPY2_CORRELATION = 60, MEMCPY2_GRAPH_NODE = 72, MEMCPY2_NEEDS = 80, /* the rest as MEMCPY */

    MEMSET_BYTES = 8, MEMSET_START = 16, MEMSET_END = 24, MEMSET_DEVICE = 32, MEMSET_GRAPH_NODE = 64,
    MEMSET_NEEDS = 72,

    SYNC_TYPE = 4, SYNC_START = 8, SYNC_END = 16, SYNC_CONTEXT = 28, SYNC_NEEDS = 40,

    API_CBID = 4, API_START = 8, API_END = 16, API_THREAD = 28, API_CORRELATION = 32, API_RESULT = 36,
    API_NEEDS = 40,
};

typedef void (*buffer_requested)(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void (*buffer_completed)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

/* The kinds of API calls that we know. */
enum api_call {
    CALL_OTHER, CALL_LAUNCH, CALL_GRAPH, CALL_COPY, CALL_CAPTURE, CALL_SYNC_EVENT, CALL_SYNC_STREAM, CALL_SYNC_CONTEXT
};
enum api_call api_call_of(int kind, uint32_t cbid);
static inline bool api_waits(enum api_call call) { return call >= CALL_SYNC_EVENT; }

/* Finds and loads libcuda (already loaded, or the reason) and libcupti. Answers AGENT_REASON_NONE or why not. */
enum agent_reason cuda_load(void);
enum agent_reason cupti_load(const char *cuda_home, bool any_version);
uint32_t cupti_version(void);
uint32_t cuda_driver_version(void); /* 0: unknown */

/* Whether a device has a context: at least one primary one is active; bits of devices. */
uint32_t cuda_active_devices(void);
bool cuda_initialised(void); /* never initialises it */
bool cuda_device_uuid(uint32_t device, uint8_t uuid[16]);

/* Whether single functions' calls can be recorded: launches, and waits. */
bool cupti_can_record_calls(void);

/* All return a CUptiResult; a failure other than that of the probe is kept for cupti_failed_call. */
int cupti_probe(void); /* CUPTI_SUBSCRIBER_TAKEN: another tool is at work */
int cupti_register(buffer_requested requested, buffer_completed completed);
int cupti_enable(int kind);
int cupti_disable(int kind);
/* Calls of the functions of an API that api_call_of knows, or only of those that wait; its kind is not enabled, which
 * would be all functions. */
int cupti_switch_calls(int kind, bool all, bool on);
int cupti_flush(bool forced); /* forced: buffers with unfinished records too */
int cupti_dropped(uint64_t *records); /* since the last call */
uint64_t cupti_now(void);             /* in the clock of the records, ns */
/* The next record after `*record` (NULL: the first); anything but CUPTI_OK: there is none. */
int cupti_next_record(uint8_t *buffer, size_t valid, uint8_t **record);
const char *cupti_failed_call(void);

/* Frames a walk over records; false: the process exits, walk not. */
bool cupti_enter(void);
void cupti_leave(void);

/* The process exits: no call of CUPTI begins any more. Waits for one that runs, 100 ms at most. */
void cupti_quit(void);

#endif
