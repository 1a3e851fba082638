/* Shared declarations of the fake NVML library. Struct layouts follow the public NVML ABI. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- NVML ABI ---- */

enum { /* nvmlReturn_t, as far as the fake gives them of itself */
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25, UNKNOWN = 999
};
typedef enum { TYPE_DOUBLE, TYPE_U32, TYPE_ULONG, TYPE_U64, TYPE_S64, TYPE_S32, TYPE_U16 } ValueType;
typedef union { double d; uint32_t u32; uint64_t u64; int64_t s64; int32_t s32; uint16_t u16; } RawValue;
typedef struct {
    uint32_t id, scope; int64_t timestamp, latency; uint32_t type; int32_t ret; RawValue value;
} FieldValue;
typedef struct {
    char bus_id_legacy[16]; uint32_t domain, bus, device, device_id, subsystem_id; char bus_id[32];
} PciInfo;
typedef struct { uint64_t total, free, used; } Memory;
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } MemoryV2;
typedef struct { uint32_t gpu, memory; } Utilization;
typedef struct { uint32_t version, sensor; int32_t temperature; } TemperatureV1;
typedef struct {
    uint32_t sm_count, copy, decoder, encoder, jpeg, ofa, gi_slices, ci_slices; uint64_t memory_mb;
} Attributes;
typedef struct { uint32_t pid; uint64_t timestamp; uint32_t sm, mem, enc, dec; } ProcessSample;
typedef struct { void *device; uint64_t type, data; uint32_t gi, ci; } EventData;
typedef struct {
    uint32_t id; int32_t ret; double value; const char *short_name, *long_name, *unit;
} GpmMetric;
typedef struct Sample Sample;
enum { GPM_METRIC_MAX = 477 };
typedef struct {
    uint32_t version, count; Sample *sample1, *sample2; GpmMetric metrics[GPM_METRIC_MAX];
} GpmMetricsGet;
typedef struct { uint32_t version, supported; } GpmSupport;
_Static_assert(sizeof(FieldValue) == 40 && sizeof(PciInfo) == 68 && sizeof(MemoryV2) == 40 &&
               sizeof(EventData) == 32 && sizeof(ProcessSample) == 32 && sizeof(Attributes) == 40 &&
               sizeof(GpmMetric) == 40 && sizeof(GpmMetricsGet) == 24 + 477 * 40,
               "the NVML ABI");

/* ---- Scenario ---- */

#define NUM(k, v) K_##k,
#define NONE(k) K_##k,
#define AUTO(k) K_##k,
#define TEXT(k)
typedef enum {
#include "keys.def"
    KEYS
} Key;
#undef NUM
#undef NONE
#undef AUTO
#undef TEXT
#define NUM(k, v)
#define NONE(k)
#define AUTO(k)
#define TEXT(k) T_##k,
typedef enum {
#include "keys.def"
    TEXTS
} TextKey;
#undef NUM
#undef NONE
#undef AUTO
#undef TEXT

enum { MAX_DEVICES = 64, MAX_MIG = 8, MAX_LINKS = 36, RET_AUTO = -1 };
#define U32NA UINT32_MAX

/* A number (long double holds any uint64 exactly) or the code to return instead of one. */
typedef struct { long double v; int ret; } Value;
typedef struct { double t; Key key; Value value; } Step;
typedef struct { Key key; double step; int count; Value *values; } Wave;
typedef enum { L_state, L_speed, L_version, L_replay, L_recovery, L_crc_flit, L_crc_data, L_ecc_data,
               LINK_ATTRS } LinkAttr;

/* A device (gi = -1) or a MIG instance. */
typedef struct {
    int device, gi, ci;
    char *text[TEXTS];
    Value base[KEYS];
    long double offset[KEYS]; /* what the integrals had gained before the last rewrite */
    Step *steps; int step_count;
    Wave *waves; int wave_count;
    Value link[MAX_LINKS][LINK_ATTRS];
} Entity;

typedef enum { AT_ANY, AT_DEVICE, AT_BOARD, AT_MIG } Where;
typedef struct { Where where; int device, gi, ci; } Target; /* gi, ci -1: any */
typedef struct { double from, until; } Span;                /* seconds since the first init */
typedef enum { ACT_CODE, ACT_HANG, ACT_CRASH, ACT_LATENCY } Action;
typedef struct {
    char *text; char *function; Target target; Action action; int code; double latency;
    uint64_t after, times; Span span; _Atomic uint64_t *seen; /* survives a rewrite */
} Fault;
typedef struct { uint32_t id; uint32_t scope; bool any_scope; Target target; Value value;
                 ValueType type; Span span; } Override; /* a field's or GPM metric's raw value */
typedef enum { P_COMPUTE, P_GRAPHICS, P_MPS } ProcessType;
typedef struct { int device; ProcessType type; uint32_t pid, gi, ci; uint64_t memory;
                 bool sampled; uint32_t sm, mem, enc, dec; Span span; } Process;
typedef struct { char *text; int device; uint64_t code; uint32_t gi; bool timed; double at; } Xid;

typedef struct Scenario Scenario;
struct Scenario {
    const Scenario *before; /* what held before the time `since` */
    double since;
    char driver_version[80], nvml_version[80];
    int cuda_version;
    double gpm_refresh;
    unsigned process_stride;
    Value count; /* RET_AUTO: as many as enumerated */
    int order[MAX_DEVICES], order_count; bool ordered;
    Entity *devices[MAX_DEVICES];
    Entity *migs[MAX_DEVICES][MAX_MIG]; int mig_count[MAX_DEVICES];
    Fault *faults; int fault_count;
    Override *fields; int field_count;
    Override *gpms; int gpm_count;
    Process *processes; int process_count;
    Xid *xids; int xid_count;
};

/* Parses a file; NULL and a message "FILE:LINE: why" on error. */
Scenario *scenario_parse(const char *path, char *error, size_t size);
/* Lets `next` follow `old` at time t: counters and integrals go on. */
void scenario_carry(const Scenario *old, Scenario *next, double t);
/* The scenario that held at time t: `s` or one before it. */
const Scenario *scenario_at(const Scenario *s, double t);
/* The entities that a target names, ended by NULL; valid until the thread's next call. */
Entity **scenario_entities(const Scenario *s, const Target *target);
bool target_matches(const Target *target, const Entity *entity);
bool span_holds(const Span *span, double t);
Value value_at(const Entity *e, Key key, double t);
/* The key's integral over 0..t; errors and NaN add nothing. */
long double integral_at(const Entity *e, Key key, double t);
const Override *override_find(const Override *list, int count, uint32_t id, uint32_t scope,
                              const Entity *e, double t);

/* ---- Runtime: calls, faults, clock ---- */

#define FN(name, flags) FN_##name,
typedef enum {
#include "functions.def"
    FUNCTIONS
} Function;
#undef FN

/* What the Python side reads next to the call counts. PEAK: a maximum, not a sum. */
typedef enum { STAT_reloads, STAT_scenario_errors, STAT_freed_sample_uses, STAT_stale_handles,
               STAT_live_samples, STAT_hangs, STAT_max_inside, STAT_gpm_max_inside,
               STAT_gpm_together, STAT_fields_together, STATS } Stat;

typedef struct { unsigned generation; int device, gi, ci; } Handle;
typedef struct { Function fn; const Scenario *scenario; const Entity *entity; double t; int entered; } Call;

/* Counts the call, loads the scenario, refuses calls before init. */
int call_open(Call *c, Function fn);
/* Enters the entity (NULL: no device) and applies the scenario's faults. */
int call_enter(Call *c, const Entity *entity);
/* The entity behind a handle; NULL and a code in *rc if there is none any more. */
const Entity *entity_of_handle(const Call *c, const Handle *handle, int *rc);
/* call_open and call_enter for a handle. */
int call_device(Call *c, Function fn, const Handle *handle);
int call_close(Call *c, int ret);
/* The newest scenario, read again if the file changed. */
const Scenario *scenario_now(void);
double seconds_now(void);
void stat_add(Stat stat, int device, int64_t amount);
const Handle *handle_of(const Entity *entity);
const Entity *entity_of_index(const Scenario *s, unsigned index);
int index_of_device(const Scenario *s, int device); /* -1: not enumerated */
const Entity *mig_find(const Scenario *s, int device, int gi, int ci);
bool mig_on(const Entity *device, const Scenario *s, double t);

#endif
