/* libcupti: PM sampling. A sampler owns a GPU, its windows pass through the hardware buffer. */
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "cupti.h"

typedef struct { uint64_t *items; size_t capacity, first, count; } Queue; /* of window numbers */

struct Sampler {
    bool live;
    uint64_t serial;
    const Device *device;
    int lock_file; /* -1: not held */
    _Atomic int users;
    pthread_mutex_t mutex;

    bool configured;
    const uint8_t *config; size_t config_size; uint64_t config_print; /* the caller's image */
    Names metrics;
    uint64_t interval;
    int32_t trigger, append;

    Names image_metrics; /* of the last GetCounterDataSize */
    uint32_t max_samples;

    bool started, running;
    int64_t start_ns, stop_ns; /* monotonic */
    uint64_t start_gpu_ns;     /* the same on the GPU's clock */
    uint64_t arrived;          /* windows that the hardware has finished and we have seen */
    bool overflow;
    bool full;                 /* KEEP_OLDEST has lost windows: no decode until the next Start */
    bool truncated;            /* the decode before filled the image */
    Queue buffer; /* the hardware buffer */
    Queue again;  /* `duplicate`: delivered once, to be delivered again */
};

static Sampler **samplers; /* never freed, so that a use after Disable is seen */
static size_t sampler_count;
static pthread_mutex_t samplers_lock = PTHREAD_MUTEX_INITIALIZER;

/* What calls take on an H200 (driver 580), and what its first windows look like. */
static const int64_t SET_CONFIG_NS = 240000000, STOP_NS = 3500000, DISABLE_NS = 65000000, DECODE_NS = 2500000,
                     WINDOW_NS = 50000;
static const uint64_t FIRST_GAP_NS = 1400, FIRST_AGE_NS = UINT64_C(187000000000);
static uint64_t last_end[MAX_DEVICES]; /* of this process's session before, on the GPU's clock */

static void spend(const Call *c, int64_t ns)
{
    if (!c->scenario->free_of_charge)
        sleep_ns(ns);
}

/* ---- Queues ---- */

static void queue_clear(Queue *q) { q->first = q->count = 0; }

static void queue_reserve(Queue *q, size_t capacity)
{
    free(q->items);
    *q = (Queue){.items = must(malloc(capacity * sizeof *q->items)), .capacity = capacity};
}

static void queue_push(Queue *q, uint64_t item) { q->items[(q->first + q->count++) % q->capacity] = item; }

static uint64_t queue_pop(Queue *q)
{
    uint64_t item = q->items[q->first];
    q->first = (q->first + 1) % q->capacity;
    q->count--;
    return item;
}

/* ---- One owner for each GPU, over all processes ---- */

/* The kernel drops the lock with the process, however that ends. */
static int own_gpu(Sampler *s)
{
    const char *directory = getenv("FAKE_CUPTI_LOCKS");
    if (!directory || s->lock_file >= 0)
        return OK;
    char path[4096];
    snprintf(path, sizeof path, "%s/gpu%d.lock", directory, s->device->id);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) {
        fprintf(stderr, "fake_cupti: %s: %s\n", path, strerror(errno));
        return UNKNOWN;
    }
    if (flock(file, LOCK_EX | LOCK_NB) != 0) {
        close(file);
        return HARDWARE_BUSY;
    }
    s->lock_file = file;
    return OK;
}

static void disown_gpu(Sampler *s)
{
    if (s->lock_file >= 0)
        close(s->lock_file);
    s->lock_file = -1;
}

/* ---- Windows ---- */

/* The time from the start to the end of `count` windows. */
static uint64_t boundary(const Sampler *s, uint64_t count)
{
    if (s->trigger == TRIGGER_TIME)
        return count * s->interval;
    double width = (double)s->interval / s->device->sysclk * 1e9;
    uint64_t mixed = count * UINT64_C(0x9e3779b97f4a7c15) >> 32;
    double jitter = count ? ((double)(mixed % 2001) - 1000) / 1000 * 5e-4 : 0; /* of a window */
    return (uint64_t)(((double)count + jitter) * width);
}

static uint64_t finished(const Sampler *s)
{
    uint64_t elapsed = (uint64_t)((s->running ? monotonic_ns() : s->stop_ns) - s->start_ns);
    if (s->trigger == TRIGGER_TIME)
        return elapsed / s->interval;
    uint64_t count = (uint64_t)((double)elapsed * s->device->sysclk / 1e9 / (double)s->interval) + 1;
    while (count && boundary(s, count) > elapsed)
        count--;
    return count;
}

static const Quirk *sampler_quirk(const Sampler *s, const Call *c, QuirkKind kind)
{
    return quirk_find(c->scenario, kind, s->device->id, s->device->chip, &s->metrics, c->t);
}

/* Whether the N of `every N` comes round with this window. */
static bool every(const Quirk *quirk, uint64_t window)
{
    return quirk && (window + 1) % quirk->number == 0;
}

static void lose(Sampler *s, uint64_t windows)
{
    if (!windows)
        return;
    s->overflow = true;
    stat_add(STAT_lost_windows, s->device->id, (int64_t)windows);
}

/* Moves what the hardware has finished since the last look into its buffer. */
static void collect(Sampler *s, const Call *c)
{
    const Quirk *drop = sampler_quirk(s, c, Q_drop);
    Queue *buffer = &s->buffer;
    uint64_t end = finished(s), window = s->arrived;
    s->arrived = end;
    if (s->append == KEEP_LATEST && end - window > buffer->capacity) {
        uint64_t skipped = end - window - buffer->capacity;
        lose(s, skipped);
        window += skipped;
    }
    for (; window < end; window++) {
        if (every(drop, window))
            continue;
        if (buffer->count == buffer->capacity) {
            if (s->append == KEEP_OLDEST) {
                lose(s, end - window);
                s->full = true;
                return;
            }
            queue_pop(buffer);
            lose(s, 1);
        }
        queue_push(buffer, window);
    }
}

static void deliver(Sampler *s, const Call *c, CounterData *data, uint64_t window)
{
    uint64_t from = boundary(s, window), to = boundary(s, window + 1);
    double t = seconds_at(s->start_ns + (int64_t)((from + to) / 2)), seconds = (double)(to - from) / 1e9;
    const Scenario *then = scenario_at(c->scenario, t);
    Window *times = counter_data_window(data, data->samples);
    *times = (Window){s->start_gpu_ns + from, s->start_gpu_ns + to};
    if (window == 0 && !c->scenario->clean_first_sample) {
        uint64_t before = last_end[s->device->id];
        *times = (Window){before ? before : times->start - FIRST_AGE_NS, times->end - FIRST_GAP_NS};
    }
    double *values = counter_data_values(data, data->samples);
    const char *name = counter_data_names(data);
    for (uint64_t i = 0; i < data->metric_count; i++, name += strlen(name) + 1)
        values[i] = metric_value(then, s->device->id, name, t, seconds);
    data->samples++;
    stat_add(STAT_windows, s->device->id, 1);
}

static int decode(Sampler *s, const Call *c, DecodeParams *p, CounterData *data)
{
    collect(s, c);
    p->overflow = s->overflow;
    p->stop_reason = STOP_END_OF_RECORDS;
    s->overflow = false;
    if (s->full) {
        p->overflow = 1;
        return OUT_OF_MEMORY;
    }
    if (sampler_quirk(s, c, Q_flood)) {
        queue_clear(&s->buffer);
        p->overflow = 1;
        return OUT_OF_MEMORY;
    }
    if (sampler_quirk(s, c, Q_no_samples))
        queue_clear(&s->buffer);
    for (size_t left = s->again.count; left && data->samples < data->max_samples; left--)
        deliver(s, c, data, queue_pop(&s->again));
    const Quirk *duplicate = sampler_quirk(s, c, Q_duplicate);
    while (s->buffer.count && data->samples < data->max_samples) {
        uint64_t window = queue_pop(&s->buffer);
        deliver(s, c, data, window);
        if (every(duplicate, window) && s->again.count < s->again.capacity)
            queue_push(&s->again, window);
    }
    if (data->samples == data->max_samples && s->buffer.count + s->again.count) {
        p->stop_reason = STOP_IMAGE_FULL;
        if (!c->scenario->full_image_keeps) {
            queue_clear(&s->buffer);
            s->truncated = true;
        }
    } else if (s->truncated) {
        p->stop_reason = STOP_OTHER;
        s->truncated = false;
    }
    const Quirk *reason = sampler_quirk(s, c, Q_stop_reason);
    if (reason)
        p->stop_reason = (int32_t)reason->number;
    return OK;
}

/* ---- Samplers and calls on them ---- */

static bool sampler_known(const Sampler *s)
{
    bool known = false;
    pthread_mutex_lock(&samplers_lock);
    for (size_t i = 0; i < sampler_count && !known; i++)
        known = samplers[i] == s;
    pthread_mutex_unlock(&samplers_lock);
    return known;
}

/* Opens a call on a sampler, for the params struct that begins with it, and enters its GPU. */
static int open_sampler(Call *c, Function fn, const void *params, size_t size)
{
    const SamplerParams *p = params;
    int rc = call_open(c, fn);
    if (rc == OK && (!params_ok(&p->head, size) || !sampler_known(p->sampler)))
        rc = INVALID_PARAMETER;
    if (rc != OK)
        return rc;
    Sampler *s = p->sampler;
    if (!s->live) {
        stat_add(STAT_dead_object_uses, s->device->id, 1);
        misuse(fn, "the PM sampling object was disabled before");
    }
    atomic_fetch_add(&s->users, 1);
    rc = call_enter(c, s->device->id);
    pthread_mutex_lock(&s->mutex);
    return rc;
}

static int close_sampler(Call *c, const void *params, int rc)
{
    if (c->entered != NO_DEVICE) {
        Sampler *s = ((const SamplerParams *)params)->sampler;
        pthread_mutex_unlock(&s->mutex);
        atomic_fetch_sub(&s->users, 1);
    }
    return call_close(c, rc);
}

static bool enabled_here(int device)
{
    for (size_t i = 0; i < sampler_count; i++)
        if (samplers[i]->live && samplers[i]->device->id == device)
            return true;
    return false;
}

static int enable(const Scenario *scenario, const Device *device, Sampler **sampler)
{
    int rc = INVALID_OPERATION;
    pthread_mutex_lock(&samplers_lock);
    if (!enabled_here(device->id)) {
        Sampler *s = must(calloc(1, sizeof *s));
        s->serial = sampler_count + 1;
        s->device = device;
        s->lock_file = -1;
        pthread_mutex_init(&s->mutex, NULL);
        rc = scenario->busy_at == BUSY_AT_ENABLE ? own_gpu(s) : OK;
        s->live = rc == OK;
        *APPEND(samplers, sampler_count) = s;
        *sampler = s;
    }
    pthread_mutex_unlock(&samplers_lock);
    return rc;
}

int cuptiPmSamplingEnable(EnableParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiPmSamplingEnable);
    bool valid = params_ok(&p->head, UP_TO(EnableParams, sampler));
    const Device *device = rc == OK && valid ? cuda_device(c.scenario, p->device) : NULL;
    if (rc == OK)
        rc = call_enter(&c, device ? device->id : NO_DEVICE);
    if (rc == OK && !device)
        rc = INVALID_PARAMETER;
    Sampler *sampler = NULL;
    if (rc == OK)
        rc = enable(c.scenario, device, &sampler);
    if (rc == OK) {
        p->sampler = sampler;
        stat_add(STAT_live_samplers, device->id, 1);
    }
    return call_close(&c, rc);
}

int cuptiPmSamplingDisable(SamplerParams *p)
{
    Call c;
    int rc = open_sampler(&c, FN_cuptiPmSamplingDisable, p, sizeof *p);
    if (rc == OK) {
        Sampler *s = p->sampler;
        if (atomic_load(&s->users) > 1) {
            stat_add(STAT_dead_object_uses, s->device->id, 1);
            misuse(c.fn, "another thread is inside a call on this object");
        }
        spend(&c, DISABLE_NS);
        s->live = false;
        disown_gpu(s);
        names_clear(&s->metrics);
        names_clear(&s->image_metrics);
        stat_add(STAT_live_samplers, s->device->id, -1);
    }
    return close_sampler(&c, p, rc);
}

static bool trigger_supported(const char *chip, const SetConfigParams *p)
{
    bool turing = fnmatch("TU1*", chip, 0) == 0;
    return !(p->trigger == TRIGGER_TIME && (turing || strcmp(chip, "GA100") == 0)) &&
           !(p->append == KEEP_LATEST && turing);
}

static int configure(Sampler *s, const Call *c, const SetConfigParams *p)
{
    size_t capacity = p->buffer_size / s->device->bytes_per_window;
    uint64_t print = config_image_print(p->config, p->config_size);
    if (s->running)
        return INVALID_OPERATION;
    if (!print || !capacity || !p->interval || p->trigger < 0 || p->trigger > TRIGGER_TIME ||
        p->append < 0 || p->append > KEEP_LATEST)
        return INVALID_PARAMETER;
    int rc = c->scenario->busy_at == BUSY_AT_SETCONFIG ? own_gpu(s) : OK;
    if (rc != OK)
        return rc;
    spend(c, SET_CONFIG_NS);
    names_clear(&s->metrics);
    config_image_metrics(p->config, &s->metrics);
    if (passes_needed(c->scenario, &s->metrics, c->t) > 1 || !trigger_supported(s->device->chip, p))
        return NOT_SUPPORTED;
    s->config = p->config;
    s->config_size = p->config_size;
    s->config_print = print;
    s->interval = p->interval;
    s->trigger = p->trigger;
    s->append = p->append;
    queue_reserve(&s->buffer, capacity);
    queue_reserve(&s->again, capacity);
    s->configured = true;
    s->started = false;
    return OK;
}

int cuptiPmSamplingSetConfig(SetConfigParams *p)
{
    Call c;
    int rc = open_sampler(&c, FN_cuptiPmSamplingSetConfig, p, UP_TO(SetConfigParams, trigger));
    if (rc == OK) {
        SetConfigParams whole = {.append = KEEP_OLDEST};  // callers of 12.6 do not know the last field
        memcpy(&whole, p, p->head.size < sizeof whole ? p->head.size : sizeof whole);
        rc = configure(p->sampler, &c, &whole);
    }
    return close_sampler(&c, p, rc);
}

static int start(Sampler *s)
{
    if (!s->configured || s->running)
        return INVALID_OPERATION;
    int rc = own_gpu(s);
    if (rc != OK)
        return rc;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    s->start_ns = monotonic_ns();
    s->start_gpu_ns =
        (uint64_t)(now.tv_sec * INT64_C(1000000000) + now.tv_nsec + s->device->offset_ns);
    clock_start(s->start_ns);
    s->started = s->running = true;
    s->overflow = s->full = s->truncated = false;
    s->arrived = 0;
    queue_clear(&s->buffer);
    queue_clear(&s->again);
    return OK;
}

int cuptiPmSamplingStart(SamplerParams *p)
{
    Call c;
    int rc = open_sampler(&c, FN_cuptiPmSamplingStart, p, sizeof *p);
    if (rc == OK)
        rc = start(p->sampler);
    return close_sampler(&c, p, rc);
}

int cuptiPmSamplingStop(SamplerParams *p)
{
    Call c;
    int rc = open_sampler(&c, FN_cuptiPmSamplingStop, p, sizeof *p);
    if (rc == OK && !p->sampler->running)
        rc = INVALID_OPERATION;
    if (rc == OK) {
        Sampler *s = p->sampler;
        spend(&c, STOP_NS);
        s->stop_ns = monotonic_ns();
        s->running = false;
        last_end[s->device->id] = s->start_gpu_ns + (uint64_t)(s->stop_ns - s->start_ns);
        if (c.scenario->busy_at == BUSY_AT_START)
            disown_gpu(s);
    }
    return close_sampler(&c, p, rc);
}

/* ---- Counter data ---- */

int cuptiPmSamplingDecodeData(DecodeParams *p)
{
    Call c;
    CounterData *data = NULL;
    int rc = open_sampler(&c, FN_cuptiPmSamplingDecodeData, p, UP_TO(DecodeParams, overflow));
    if (rc == OK && ((data = counter_data(c.fn, p->image, p->image_size)) == NULL ||
                     data->sampler != p->sampler->serial))
        rc = INVALID_PARAMETER;
    if (rc == OK && !p->sampler->started)
        rc = INVALID_OPERATION;
    if (rc == OK &&
        config_image_print(p->sampler->config, p->sampler->config_size) != p->sampler->config_print)
        misuse(c.fn, "the config image changed since SetConfig: it must live until Disable");
    if (rc == OK) {
        uint64_t before = data->samples;
        rc = decode(p->sampler, &c, p, data);
        spend(&c, DECODE_NS + WINDOW_NS * (int64_t)(data->samples - before));
    }
    return close_sampler(&c, p, rc);
}

int cuptiPmSamplingGetCounterAvailability(AvailabilityParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiPmSamplingGetCounterAvailability);
    bool valid = params_ok(&p->head, UP_TO(AvailabilityParams, image));
    const Device *device = rc == OK && valid ? cuda_device(c.scenario, p->device) : NULL;
    if (rc == OK)
        rc = call_enter(&c, device ? device->id : NO_DEVICE);
    if (rc == OK && (!device || (p->image && p->image_size < availability_image_size())))
        rc = INVALID_PARAMETER;
    if (rc == OK && p->image)
        availability_image_write(p->image);
    if (rc == OK)
        p->image_size = availability_image_size();
    return call_close(&c, rc);
}

int cuptiPmSamplingGetCounterDataSize(ImageSizeParams *p)
{
    Call c;
    int rc = open_sampler(&c, FN_cuptiPmSamplingGetCounterDataSize, p, UP_TO(ImageSizeParams, image_size));
    if (rc == OK && (p->count == 0 || !names_given(p->metrics, p->count) || p->max_samples == 0))
        rc = INVALID_PARAMETER;
    if (rc == OK) {
        Sampler *s = p->sampler;
        names_clear(&s->image_metrics);
        names_append(&s->image_metrics, p->metrics, p->count);
        s->max_samples = p->max_samples;
        p->image_size = counter_data_size(&s->image_metrics, s->max_samples);
    }
    return close_sampler(&c, p, rc);
}

int cuptiPmSamplingCounterDataImageInitialize(ImageInitParams *p)
{
    Call c;
    int rc = open_sampler(&c, FN_cuptiPmSamplingCounterDataImageInitialize, p,
                          UP_TO(ImageInitParams, image));
    if (rc == OK) {
        Sampler *s = p->sampler;
        if (!p->image || p->image_size != counter_data_size(&s->image_metrics, s->max_samples))
            rc = INVALID_PARAMETER;
        else
            counter_data_init(p->image, s->serial, s->device->id, &s->image_metrics, s->max_samples);
    }
    return close_sampler(&c, p, rc);
}

int cuptiPmSamplingGetCounterDataInfo(ImageInfoParams *p)
{
    Call c;
    const CounterData *data = NULL;
    int rc = call_open(&c, FN_cuptiPmSamplingGetCounterDataInfo);
    if (rc == OK && (!params_ok(&p->head, UP_TO(ImageInfoParams, completed)) ||
                     (data = counter_data(c.fn, p->image, p->image_size)) == NULL))
        rc = INVALID_PARAMETER;
    if (rc == OK)
        rc = call_enter(&c, (int)data->device);
    if (rc == OK) {
        p->total = data->max_samples;
        p->populated = p->completed = data->samples;
    }
    return call_close(&c, rc);
}

int cuptiPmSamplingCounterDataGetSampleInfo(SampleInfoParams *p)
{
    Call c;
    const CounterData *data = NULL;
    int rc = open_sampler(&c, FN_cuptiPmSamplingCounterDataGetSampleInfo, p, UP_TO(SampleInfoParams, end));
    if (rc == OK && ((data = counter_data(c.fn, p->image, p->image_size)) == NULL ||
                     p->index >= data->samples || data->sampler != p->sampler->serial))
        rc = INVALID_PARAMETER;
    if (rc == OK) {
        const Window *window = counter_data_window(data, p->index);
        p->start = window->start;
        p->end = window->end;
    }
    return close_sampler(&c, p, rc);
}
