/* A CUDA driver and a CUPTI that trace what the host program says it launched. */
#ifndef FAKE_ACTIVITY_H
#define FAKE_ACTIVITY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, KINDS = 64, API_IDS = 1024, MAX_DEVICES = 32 };
enum { MEMCPY = 1, MEMSET = 2, DRIVER = 4, RUNTIME = 5, KERNEL = 10, MEMCPY2 = 22, SYNC = 38 };

typedef void (*Requested)(uint8_t **buffer, size_t *size, size_t *most);
typedef void (*Completed)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

/* ---- What the libraries share; all of it in libfake_activity.so ---- */

typedef struct {
    uint32_t version;         /* cuptiGetVersion */
    int driver;               /* cuDriverGetVersion */
    int devices;
    bool global_buffers;      /* all threads write into the same buffers; otherwise each has its own */
    atomic_bool stalled;      /* full buffers are not given back */
    bool keeps_empty;         /* flushes give back none without records */
    bool secure;              /* the program has more rights than its user */
    bool has_alarms;          /* whose signals interrupt what takes long */
    size_t records_per_buffer; /* 0: as many as fit */
} Settings;
extern Settings settings;

/* Counts a call of ours to the library and answers what a fault line says it shall. */
int call(const char *function);
void fault(const char *function, int code, long after); /* after so many good calls */
void slow(const char *function, long ms);
/* Prints `function=calls …` and what was noticed. */
void print_calls(void);
int64_t realtime(void);
void set_clock(int64_t by); /* from now on it is so much later */
void begin_exit(void); /* any call from now on aborts */

/* ---- Activity (engine.c) ---- */

bool kind_on(int kind);
long kernel_enables(void); /* how often kernels have been switched on */
bool api_on(int kind, uint32_t id);
uint32_t next_correlation(void);
void set_correlation(uint32_t next);
/* Appends a record that is complete at `end` to the buffer of this thread, or to that numbered `lane`. */
void append(const void *record, size_t size, int64_t end, int lane);
size_t record_size(uint32_t kind);
void print_kinds(void);
void abandon_buffers(void); /* a fork's child: CUPTI is dead there, but its callbacks may be called */

/* The other tool. */
void tool_subscribe(bool yes);
void tool_wants_calls(bool yes);    /* of all functions, and no subscription; or no more */
void tool_wants_waits(void);
bool tool_is_subscribed(void);
void tool_take_over(bool frees);    /* its callbacks and kinds, as torch.profiler does; frees: also our buffers */
long tool_let_go(void);             /* disables them; answers how many kernels it got */
void tool_return_foreign(void);     /* calls the agent's callback with a buffer that the agent never gave */

void cuda_context(int device);
int cuda_contexts(int device);
void cuda_init_done(void);
bool cuda_is_init(void);
void cuda_init_goes_on(bool yes); /* on this thread */
bool is_in_cuinit(void);

#endif
