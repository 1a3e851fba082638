/* Finding CUPTI, and calling it. */
#define _GNU_SOURCE
#include "cupti.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "agent.h"

OLDEST_GLIBC(dlopen);
OLDEST_GLIBC(dlsym);

/* ---- Functions ---- */

typedef void (*callback)(void *user, int domain, uint32_t id, const void *data);

static struct {
    int (*cuptiGetVersion)(uint32_t *version);
    int (*cuptiSubscribe)(void **subscriber, callback function, void *user);
    int (*cuptiUnsubscribe)(void *subscriber);
    int (*cuptiActivityRegisterCallbacks)(buffer_requested requested, buffer_completed completed);
    int (*cuptiActivityEnable)(int kind);
    int (*cuptiActivityDisable)(int kind);
    int (*cuptiActivityFlushAll)(uint32_t flag);
    int (*cuptiActivityGetNextRecord)(uint8_t *buffer, size_t valid, uint8_t **record);
    int (*cuptiActivityGetNumDroppedRecords)(void *context, uint32_t stream, size_t *dropped);
    int (*cuptiActivitySetAttribute)(int attribute, size_t *size, void *value);
    int (*cuptiGetTimestamp)(uint64_t *timestamp);
    int (*cuptiActivityEnableRuntimeApi)(uint32_t cbid, uint8_t enable);
    int (*cuptiActivityEnableDriverApi)(uint32_t cbid, uint8_t enable);
} cupti;

static struct {
    int (*cuDriverGetVersion)(int *version);
    int (*cuDeviceGetCount)(int *count);
    int (*cuDeviceGet)(int *device, int ordinal);
    int (*cuDeviceGetUuid)(uint8_t uuid[16], int device);
    int (*cuDevicePrimaryCtxGetState)(int device, unsigned *flags, int *active);
} cuda;

static uint32_t version, driver;

/* A data pointer becomes a function's: POSIX lets it, ISO C has no cast for it. */
static bool look_up(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

#define CUPTI(name) look_up(library, #name, &cupti.name)
#define CUDA(name) look_up(library, #name, &cuda.name)

/* ---- The end of the process ---- */

/* CUPTI is torn down while the process exits, perhaps under our feet: from then on nothing of it is called. */
static atomic_bool quitting, inside;
static const char *failed_call = "";

bool cupti_enter(void)
{
    atomic_store(&inside, true);
    if (!atomic_load(&quitting))
        return true;
    atomic_store(&inside, false);
    return false;
}

void cupti_leave(void) { atomic_store(&inside, false); }

static int left(int result, const char *name)
{
    cupti_leave();
    if (result != CUPTI_OK && name)
        failed_call = name;
    return result;
}

#define ASK(name, ...) (cupti_enter() ? left(cuda.name(__VA_ARGS__), NULL) : CUPTI_QUITTING)
#define CALL(name, ...) (cupti_enter() ? left(cupti.name(__VA_ARGS__), #name) : CUPTI_QUITTING)

void cupti_quit(void)
{
    atomic_store(&quitting, true);
    for (int i = 0; i < 100 && atomic_load(&inside); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

const char *cupti_failed_call(void) { return failed_call; }

/* ---- The driver ---- */

enum agent_reason cuda_load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return AGENT_REASON_NO_CUDA;
    if (!CUDA(cuDeviceGetCount) || !CUDA(cuDeviceGet) || !CUDA(cuDevicePrimaryCtxGetState))
        return AGENT_REASON_NO_CUDA;
    if (!look_up(library, "cuDeviceGetUuid_v2", &cuda.cuDeviceGetUuid)) /* that knows MIG */
        CUDA(cuDeviceGetUuid);
    int number = 0;
    if (CUDA(cuDriverGetVersion) && ASK(cuDriverGetVersion, &number) == 0 && number > 0)
        driver = (uint32_t)number;
    return AGENT_REASON_NONE;
}

uint32_t cuda_driver_version(void) { return driver; }

static uint32_t device_count(void)
{
    int count = 0;
    if (ASK(cuDeviceGetCount, &count) != 0 || count < 0)
        return 0;
    return (uint32_t)count < AGENT_DEVICES ? (uint32_t)count : AGENT_DEVICES;
}

bool cuda_initialised(void) { return device_count() > 0; }

uint32_t cuda_active_devices(void)
{
    uint32_t active_ones = 0, count = device_count();
    for (uint32_t i = 0; i < count; i++) {
        int device = 0, active = 0;
        unsigned flags = 0;
        if (ASK(cuDeviceGet, &device, (int)i) == 0 &&
            ASK(cuDevicePrimaryCtxGetState, device, &flags, &active) == 0 && active)
            active_ones |= 1u << i;
    }
    return active_ones;
}

bool cuda_device_uuid(uint32_t ordinal, uint8_t uuid[16])
{
    int device = 0;
    return cuda.cuDeviceGetUuid && ASK(cuDeviceGet, &device, (int)ordinal) == 0 &&
           ASK(cuDeviceGetUuid, uuid, device) == 0;
}

/* ---- Finding libcupti ---- */

enum { PATH_SIZE = 1024 };

struct loaded {
    char cupti[PATH_SIZE];
    char runtime[PATH_SIZE]; /* libcudart */
};

static int look_at(struct dl_phdr_info *object, size_t size, void *user)
{
    (void)size;
    struct loaded *loaded = user;
    const char *path = object->dlpi_name, *slash = path ? strrchr(path, '/') : NULL;
    if (!slash || strlen(path) >= PATH_SIZE)
        return 0;
    /* Some wheels insert a hash: libcupti-4f0b6fa7.so.12. */
    if (strncmp(slash, "/libcupti", 9) == 0 && (slash[9] == '.' || slash[9] == '-'))
        memcpy(loaded->cupti, path, strlen(path) + 1);
    else if (strncmp(slash, "/libcudart", 10) == 0)
        memcpy(loaded->runtime, path, strlen(path) + 1);
    return 0;
}

static void *open_library(const char *format, const char *folder, unsigned major)
{
    char path[PATH_SIZE + 64];
    int length = snprintf(path, sizeof path, format, folder, major);
    return length > 0 && (size_t)length < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

/* That of the runtime's own CUDA: in NVIDIA's wheels of CUDA 13, those of CUDA 12, or a toolkit. */
static void *beside_runtime(char *runtime)
{
    const char *suffix = strstr(runtime, ".so.");
    char *slash = strrchr(runtime, '/');
    unsigned major = suffix ? (unsigned)decimal(suffix + 4) : 0;
    if (!slash || !major || major > 99)
        return NULL;
    *slash = 0; /* the folder stays */
    static const char *const PLACES[] = {
        "%s/libcupti.so.%u",
        "%s/../../cuda_cupti/lib/libcupti.so.%u",
        "%s/../extras/CUPTI/lib64/libcupti.so.%u",
        "%s/../../../extras/CUPTI/lib64/libcupti.so.%u",
    };
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof PLACES / sizeof *PLACES; i++)
        library = open_library(PLACES[i], runtime, major);
    return library;
}

static void *find_library(const char *cuda_home)
{
    struct loaded loaded = {0};
    dl_iterate_phdr(look_at, &loaded);
    if (*loaded.cupti) /* two copies in one process do not go together: this one or none */
        return dlopen(loaded.cupti, RTLD_NOW | RTLD_NOLOAD);
    void *library = beside_runtime(loaded.runtime);
    unsigned major = driver / 1000; /* a CUPTI newer than the driver does not work */
    if (!library && *cuda_home && major)
        library = open_library("%s/extras/CUPTI/lib64/libcupti.so.%u", cuda_home, major);
    if (!library && *cuda_home && major == 13)
        library = open_library("%s/extras/CUPTI/lib64/libcupti.so.%u", cuda_home, 12);
    /* A runtime that is linked statically tells nothing: where this machine's libraries are. */
    if (!library && major)
        library = open_library("%slibcupti.so.%u", "", major);
    if (!library && major == 13)
        library = open_library("%slibcupti.so.%u", "", 12);
    return library;
}

enum agent_reason cupti_load(const char *cuda_home, bool any_version)
{
    void *library = find_library(cuda_home);
    if (!library)
        return AGENT_REASON_NO_CUPTI;
    if (!CUPTI(cuptiGetVersion) || !CUPTI(cuptiSubscribe) || !CUPTI(cuptiUnsubscribe) ||
        !CUPTI(cuptiActivityRegisterCallbacks) || !CUPTI(cuptiActivityEnable) || !CUPTI(cuptiActivityDisable) ||
        !CUPTI(cuptiActivityFlushAll) || !CUPTI(cuptiActivityGetNextRecord))
        return AGENT_REASON_MISSING_FUNCTION;
    CUPTI(cuptiActivityGetNumDroppedRecords);
    CUPTI(cuptiActivitySetAttribute);
    CUPTI(cuptiGetTimestamp);
    CUPTI(cuptiActivityEnableRuntimeApi);
    CUPTI(cuptiActivityEnableDriverApi);
    if (CALL(cuptiGetVersion, &version) != CUPTI_OK)
        return AGENT_REASON_CUPTI_ERROR;
    if ((version < CUPTI_12_0 || version > CUPTI_NEWEST || (version > CUPTI_12_9 && version < 130000)) && !any_version)
        return AGENT_REASON_UNKNOWN_VERSION;
    return AGENT_REASON_NONE;
}

uint32_t cupti_version(void) { return version; }

/* ---- Calls ---- */

bool cupti_can_record_calls(void)
{
    return version >= CUPTI_12_5 && cupti.cuptiActivityEnableRuntimeApi && cupti.cuptiActivityEnableDriverApi;
}

static void never_called(void *user, int domain, uint32_t id, const void *data)
{
    (void)user, (void)domain, (void)id, (void)data;
}

int cupti_probe(void)
{
    static void *kept; /* ours while it could not be given back */
    void *subscriber = kept;
    int result = kept ? CUPTI_OK : CALL(cuptiSubscribe, &subscriber, never_called, NULL);
    if (result != CUPTI_OK)
        return result;
    result = CALL(cuptiUnsubscribe, subscriber);
    kept = result == CUPTI_OK ? NULL : subscriber;
    return result;
}

int cupti_register(buffer_requested requested, buffer_completed completed)
{
    uint8_t on = 1;
    size_t size = sizeof on;
    if (version < CUPTI_13_0_1 && cupti.cuptiActivitySetAttribute) /* not supported everywhere: no matter */
        (void)CALL(cuptiActivitySetAttribute, ATTRIBUTE_HOST_PINNED, &size, &on);
    return CALL(cuptiActivityRegisterCallbacks, requested, completed);
}

int cupti_enable(int kind) { return CALL(cuptiActivityEnable, kind); }

int cupti_disable(int kind) { return CALL(cuptiActivityDisable, kind); }

int cupti_flush(bool forced) { return CALL(cuptiActivityFlushAll, forced ? FLUSH_FORCED : 0u); }

int cupti_dropped(uint64_t *records)
{
    size_t number = 0;
    int result = cupti.cuptiActivityGetNumDroppedRecords
                     ? CALL(cuptiActivityGetNumDroppedRecords, NULL, 0, &number)
                     : CUPTI_OK;
    *records = number;
    return result;
}

uint64_t cupti_now(void)
{
    uint64_t now = 0;
    if (cupti.cuptiGetTimestamp && CALL(cuptiGetTimestamp, &now) == CUPTI_OK && now)
        return now;
    return realtime_ns(); /* on Linux the same clock */
}

/* Called between cupti_enter and cupti_leave, once a buffer: twice an atomic store a record would cost more than it. */
int cupti_next_record(uint8_t *buffer, size_t valid, uint8_t **record)
{
    return cupti.cuptiActivityGetNextRecord(buffer, valid, record);
}

/* ---- Which API calls ---- */

/* Function ids never change. ptsz and ptds: the variants for a default stream per thread. */
enum api_call api_call_of(int kind, uint32_t cbid)
{
    if (kind == KIND_RUNTIME) {
        switch (cbid) {
        case 211: case 214: /* cudaLaunchKernel, ptsz */
        case 269: case 270: /* cudaLaunchCooperativeKernel, ptsz */
        case 430: case 431: /* cudaLaunchKernelExC, ptsz */
            return CALL_LAUNCH;
        case 311: case 312: /* cudaGraphLaunch, ptsz */
            return CALL_GRAPH;
        case 315: case 316: /* cudaStreamBeginCapture, ptsz */
        case 319: case 320: /* cudaStreamEndCapture, ptsz */
            return CALL_CAPTURE;
        case 31: case 215: /* cudaMemcpy, ptds */
        case 41: case 225: /* cudaMemcpyAsync, ptsz */
            return CALL_COPY;
        case 137: /* cudaEventSynchronize */
            return CALL_SYNC_EVENT;
        case 131: case 239: /* cudaStreamSynchronize, ptsz */
            return CALL_SYNC_STREAM;
        case 126: case 165: case 534: /* cudaThreadSynchronize, cudaDeviceSynchronize, cudaExecutionCtxSynchronize */
            return CALL_SYNC_CONTEXT;
        default:
            return CALL_OTHER;
        }
    }
    switch (cbid) {
    case 307: case 442: /* cuLaunchKernel, ptsz */
    case 477: case 478: /* cuLaunchCooperativeKernel, ptsz */
    case 652: case 653: /* cuLaunchKernelEx, ptsz */
        return CALL_LAUNCH;
    case 514: case 515: /* cuGraphLaunch, ptsz */
        return CALL_GRAPH;
    case 495: case 496: /* cuStreamBeginCapture, ptsz */
    case 497: case 498: /* cuStreamEndCapture, ptsz */
    case 539: case 540: /* cuStreamBeginCapture_v2, ptsz */
        return CALL_CAPTURE;
    case 276: case 277: /* cuMemcpyHtoD_v2, Async */
    case 278: case 279: /* cuMemcpyDtoH_v2, Async */
        return CALL_COPY;
    case 121: /* cuEventSynchronize */
        return CALL_SYNC_EVENT;
    case 126: case 440: /* cuStreamSynchronize, ptsz */
        return CALL_SYNC_STREAM;
    case 17: case 800: /* cuCtxSynchronize, v2 */
        return CALL_SYNC_CONTEXT;
    default:
        return CALL_OTHER;
    }
}

/* The highest ids that every version here knows of those above, and how far the versions before 13.1 go at least (tried
 * on 13.0); an id that a library does not know ends its list. */
enum { RUNTIME_KNOWN = 431, RUNTIME_IDS = 520, DRIVER_KNOWN = 653, DRIVER_IDS = 800, NEWER_IDS = 100 };

int cupti_switch_calls(int kind, bool all, bool on)
{
    bool runtime = kind == KIND_RUNTIME;
    int (*switch_id)(uint32_t, uint8_t) =
        runtime ? cupti.cuptiActivityEnableRuntimeApi : cupti.cuptiActivityEnableDriverApi;
    const char *name = runtime ? "cuptiActivityEnableRuntimeApi" : "cuptiActivityEnableDriverApi";
    uint32_t known = runtime ? RUNTIME_KNOWN : DRIVER_KNOWN;
    uint32_t ids = (runtime ? RUNTIME_IDS : DRIVER_IDS) + (version >= 130100 ? NEWER_IDS : 0);
    for (uint32_t id = 1; id < ids; id++) {
        enum api_call call = api_call_of(kind, id);
        if (call == CALL_OTHER || (!all && !api_waits(call)))
            continue;
        if (!cupti_enter())
            return CUPTI_QUITTING;
        int result = left(switch_id(id, on), name);
        if (result != CUPTI_OK)
            return id > known ? CUPTI_OK : result;
    }
    return CUPTI_OK;
}
