/* Names of metrics and the images that hold them: config, counter availability, counter data. */
#include <stdlib.h>
#include <string.h>

#include "cupti.h"

/* ---- Names ---- */

bool names_given(const char *const *metrics, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!metrics || !metrics[i])
            return false;
    return true;
}

void names_append(Names *names, const char *const *metrics, size_t count)
{
    for (size_t i = 0; i < count; i++)
        *APPEND(names->names, names->count) = must(strdup(metrics[i]));
}

void names_clear(Names *names)
{
    for (size_t i = 0; i < names->count; i++)
        free(names->names[i]);
    free(names->names);
    *names = (Names){NULL, 0};
}

static size_t packed_size(const Names *names)
{
    size_t size = 0;
    for (size_t i = 0; i < names->count; i++)
        size += strlen(names->names[i]) + 1;
    return (size + 7) & ~(size_t)7; /* what follows stays aligned */
}

static void pack(char *to, const Names *names)
{
    memset(to, 0, packed_size(names));
    for (size_t i = 0; i < names->count; i++)
        to = stpcpy(to, names->names[i]) + 1;
}

/* ---- Config image ---- */

static const uint64_t CONFIG_MAGIC = 0x676966636b616621, AVAILABILITY_MAGIC = 0x6c6976616b616621,
                      COUNTER_MAGIC = 0x72746e636b616621;
typedef struct { uint64_t magic, size, metric_count; char names[]; } ConfigImage;

size_t config_image_size(const Names *metrics) { return sizeof(ConfigImage) + packed_size(metrics); }

void config_image_write(uint8_t *image, const Names *metrics)
{
    ConfigImage *config = (ConfigImage *)image;
    *config = (ConfigImage){CONFIG_MAGIC, config_image_size(metrics), metrics->count};
    pack(config->names, metrics);
}

uint64_t config_image_print(const uint8_t *image, size_t size)
{
    const ConfigImage *config = (const ConfigImage *)image;
    if (!image || size < sizeof *config || config->magic != CONFIG_MAGIC || config->size > size)
        return 0;
    uint64_t print = 0xcbf29ce484222325; /* FNV-1a */
    for (size_t i = 0; i < config->size; i++)
        print = (print ^ image[i]) * 0x100000001b3;
    return print | 1;
}

void config_image_metrics(const uint8_t *image, Names *metrics)
{
    const ConfigImage *config = (const ConfigImage *)image;
    const char *name = config->names;
    for (uint64_t i = 0; i < config->metric_count; i++, name += strlen(name) + 1)
        names_append(metrics, &name, 1);
}

uint64_t passes_needed(const Scenario *s, const Names *metrics, double t)
{
    const Quirk *quirk = quirk_find(s, Q_passes, NO_DEVICE, NULL, metrics, t);
    uint64_t by_count = (metrics->count + s->max_metrics - 1) / s->max_metrics;
    if (quirk && quirk->number > by_count)
        return quirk->number;
    return by_count ? by_count : 1;
}

/* ---- Counter availability image ---- */

size_t availability_image_size(void) { return 256; }

void availability_image_write(uint8_t *image)
{
    memset(image, 0, availability_image_size());
    memcpy(image, &AVAILABILITY_MAGIC, sizeof AVAILABILITY_MAGIC);
}

bool availability_image_ok(const uint8_t *image)
{
    return memcmp(image, &AVAILABILITY_MAGIC, sizeof AVAILABILITY_MAGIC) == 0;
}

/* ---- Counter data image: header, names, windows with their values ---- */

static size_t sample_size(uint64_t metric_count)
{
    return sizeof(Window) + (size_t)metric_count * sizeof(double);
}

size_t counter_data_size(const Names *metrics, uint32_t max_samples)
{
    return sizeof(CounterData) + packed_size(metrics) + max_samples * sample_size(metrics->count);
}

void counter_data_init(uint8_t *image, uint64_t sampler, int device, const Names *metrics,
                       uint32_t max_samples)
{
    CounterData *data = (CounterData *)image;
    *data = (CounterData){.magic = COUNTER_MAGIC,
                          .size = counter_data_size(metrics, max_samples),
                          .sampler = sampler,
                          .device = device,
                          .max_samples = max_samples,
                          .metric_count = metrics->count,
                          .names_size = packed_size(metrics)};
    pack((char *)(data + 1), metrics);
}

CounterData *counter_data(Function fn, const uint8_t *image, size_t size)
{
    CounterData *data = (CounterData *)(uintptr_t)image;
    if (!image || size < sizeof *data)
        return NULL;
    if (data->magic != COUNTER_MAGIC)
        misuse(fn, "the counter data image was not initialised, or was overwritten");
    return data->size == size ? data : NULL;
}

Window *counter_data_window(const CounterData *data, size_t index)
{
    const char *samples = (const char *)(data + 1) + data->names_size;
    return (Window *)(uintptr_t)(samples + index * sample_size(data->metric_count));
}

double *counter_data_values(const CounterData *data, size_t index)
{
    return (double *)(counter_data_window(data, index) + 1);
}

const char *counter_data_names(const CounterData *data) { return (const char *)(data + 1); }
