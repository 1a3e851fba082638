/* What the fake's three libraries share: the scenario and the frame of every call (libfake_cupti.so). */
#ifndef FAKE_CUPTI_H
#define FAKE_CUPTI_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { /* CUptiResult, as far as the fake gives them of itself */
    OK = 0, INVALID_PARAMETER = 1, INVALID_DEVICE = 2, INVALID_OPERATION = 7, OUT_OF_MEMORY = 8,
    SIZE_NOT_SUFFICIENT = 10, NOT_INITIALIZED = 15, INVALID_METRIC_NAME = 17, HARDWARE_BUSY = 26,
    NOT_SUPPORTED = 27, UNKNOWN = 999
};
enum { /* CUresult */
    CUDA_INVALID_VALUE = 1, CUDA_NOT_INITIALIZED = 3, CUDA_NO_DEVICE = 100, CUDA_INVALID_DEVICE = 101
};

/* ---- Scenario ---- */

enum { MAX_DEVICES = 64, ANY_DEVICE = -1, NO_DEVICE = -1 };

typedef struct {
    int id;
    char *uuid, *name, *chip;
    uint8_t uuid_bytes[16];
    double sysclk;            /* hertz */
    int64_t offset_ns;        /* the GPU's clock minus CLOCK_REALTIME */
    uint64_t bytes_per_window; /* in the hardware buffer */
} Device;

typedef struct { double from, until; } Span; /* seconds since the first cuptiPmSamplingStart */
typedef struct { int device; char *metric; bool glob; double value; bool rate; Span span; } Value;
typedef enum { ACT_CODE, ACT_HANG, ACT_CRASH, ACT_EXIT, ACT_KILLED, ACT_LATENCY } Action;
typedef struct {
    char *text, *function;
    int device;
    Action action;
    int code;
    double latency;
    uint64_t after, times;
    Span span;
    _Atomic uint64_t *seen; /* survives a rewrite */
} Fault;

/* Oddities of CUPTI, each a line `KEYWORD [NUMBER] [device D] [chip GLOB] [when GLOB] [SPAN]`. */
typedef enum { Q_no_samples, Q_flood, Q_drop, Q_duplicate, Q_stop_reason, Q_passes, Q_unknown_metric,
               QUIRKS } QuirkKind;
typedef struct { QuirkKind kind; uint64_t number; int device; char *chip, *when; Span span; } Quirk;

typedef enum { BUSY_AT_ENABLE, BUSY_AT_SETCONFIG, BUSY_AT_START } BusyAt;

typedef struct Scenario Scenario;
struct Scenario {
    const Scenario *before; /* what held before the time `since` */
    double since;
    uint32_t version;
    int driver_cuda;
    uint64_t max_metrics;
    BusyAt busy_at;                            /* where a GPU with another owner answers 26 */
    bool full_image_keeps;                     /* what does not fit is left for later, not lost */
    bool clean_first_sample;                   /* not begun long before the session */
    bool free_of_charge;                       /* calls take no time */
    const char **chips; int chip_count;        /* that this libcupti knows */
    Device *devices[MAX_DEVICES];              /* by id */
    int order[MAX_DEVICES], device_count;      /* ids as declared */
    Value *values; int value_count;
    Fault *faults; int fault_count;
    Quirk *quirks; int quirk_count;
};

typedef struct { char **names; size_t count; } Names; /* of metrics */

/* Parses a file; NULL and a message "FILE:LINE: why" on error. */
Scenario *scenario_parse(const char *path, char *error, size_t size);
/* Lets `next` follow `old` at time t: what was before does not change, faults keep their counts. */
void scenario_carry(const Scenario *old, Scenario *next, double t);
/* The scenario that held at time t: `s` or one before it. */
const Scenario *scenario_at(const Scenario *s, double t);
bool span_holds(const Span *span, double t);
/* What a metric reads in a window of `seconds` around time t. */
double metric_value(const Scenario *s, int device, const char *metric, double t, double seconds);
/* The first quirk of this kind that holds for these metrics; NULL: none. */
const Quirk *quirk_find(const Scenario *s, QuirkKind kind, int device, const char *chip,
                        const Names *metrics, double t);

/* ---- Runtime: calls, faults, clock ---- */

#define FN(name, flags) FN_##name,
typedef enum {
#include "functions.def"
    FUNCTIONS
} Function;
#undef FN

/* What the Python side reads next to the call counts. max_inside: a maximum, not a sum. */
typedef enum { STAT_reloads, STAT_scenario_errors, STAT_dead_object_uses, STAT_live_samplers,
               STAT_live_hosts, STAT_windows, STAT_lost_windows, STAT_hangs, STAT_max_inside,
               STATS } Stat;

typedef struct { Function fn; const Scenario *scenario; double t; int entered; } Call;

/* Counts the call, loads the scenario, refuses calls before cuInit or cuptiProfilerInitialize. */
int call_open(Call *c, Function fn);
/* Enters a device (or NO_DEVICE) and applies the scenario's faults. */
int call_enter(Call *c, int device);
int call_close(Call *c, int ret);
/* Ends the process with a message, where the real library would corrupt memory or crash. */
_Noreturn void misuse(Function fn, const char *why);
void stat_add(Stat stat, int device, int64_t amount);
int64_t monotonic_ns(void);
void sleep_ns(int64_t ns);
double seconds_at(int64_t monotonic); /* since the first start; 0 before it */
void clock_start(int64_t monotonic);  /* the process's first call sets the origin of all times */

/* cuInit: reads CUDA_VISIBLE_DEVICES; the number of devices that are visible. */
int cuda_start(const Scenario *s);
int cuda_device_count(void);
/* The scenario's device behind a CUDA ordinal; NULL: none. */
const Device *cuda_device(const Scenario *s, size_t ordinal);
void profiler_users(int change);

/* Makes room for one more item and returns it, zeroed. */
#define APPEND(array, count) \
    ((array) = must(realloc((array), sizeof *(array) * ((size_t)(count) + 1))), \
     memset(&(array)[count], 0, sizeof *(array)), &(array)[(count)++])
void *must(void *memory); /* the test host has memory */

#endif
