/* The scenario file: parser, defaults, look-ups. */
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cupti.h"

#define FN(name, flags) #name,
static const char *const FUNCTION_NAMES[FUNCTIONS] = {
#include "functions.def"
};
#undef FN
static const char *const QUIRK_NAMES[QUIRKS] = {"no_samples",  "flood",  "drop",          "duplicate",
                                                "stop_reason", "passes", "unknown_metric"};
static const char *DEFAULT_CHIPS[] = {/* of CUPTI 12.9 */
    "GV100", "GV11B", "TU102", "TU104", "TU106", "TU116", "TU117", "GA100", "GA102", "GA103",
    "GA104", "GA106", "GA107", "GA10B", "GH100", "AD102", "AD103", "AD104", "AD106", "AD107",
    "GB100", "GB102", "GB10B", "GB202", "GB203", "GB205", "GB206", "GB20B"};
static const Span ALWAYS = {0, INFINITY};

enum { MAX_WORDS = 256 };
typedef struct {
    Scenario *s;
    char *words[MAX_WORDS];
    int count, at, line;
    const char *path, *text;
    char *error; size_t size;
    jmp_buf failed;
} Parser;

static _Noreturn void fail(Parser *p, const char *format, ...)
{
    int used = snprintf(p->error, p->size, "%s:%d: ", p->path, p->line);
    va_list args;
    va_start(args, format);
    if (used > 0 && (size_t)used < p->size)
        vsnprintf(p->error + used, p->size - (size_t)used, format, args);
    va_end(args);
    longjmp(p->failed, 1);
}

void *must(void *memory)
{
    if (!memory)
        abort();
    return memory;
}

/* ---- Words ---- */

static const char *peek(const Parser *p) { return p->at < p->count ? p->words[p->at] : NULL; }

static const char *take(Parser *p, const char *what)
{
    if (p->at >= p->count)
        fail(p, "%s expected at the end of the line", what);
    return p->words[p->at++];
}

static char *take_copy(Parser *p, const char *what) { return must(strdup(take(p, what))); }

static bool accept(Parser *p, const char *word)
{
    if (!peek(p) || strcmp(peek(p), word) != 0)
        return false;
    p->at++;
    return true;
}

static void expect(Parser *p, const char *word)
{
    if (!accept(p, word))
        fail(p, "'%s' expected", word);
}

static double number(Parser *p, const char *what)
{
    const char *word = take(p, what);
    char *end;
    double v = strtod(word, &end);
    if (end == word || *end)
        fail(p, "%s: '%s' is no number", what, word);
    return v;
}

static double whole(Parser *p, const char *what, double low, double high)
{
    double v = number(p, what);
    if (!(v >= low && v <= high) || v != floor(v))
        fail(p, "%s: not a whole number in %.0f..%.0f", what, low, high);
    return v;
}

static double seconds(Parser *p, const char *what)
{
    double v = number(p, what);
    if (!(v >= 0))
        fail(p, "%s: negative", what);
    return v;
}

static int device_id(Parser *p) { return (int)whole(p, "device", 0, MAX_DEVICES - 1); }

static int declared_device(Parser *p)
{
    int id = device_id(p);
    if (!p->s->devices[id])
        fail(p, "device %d is not declared above", id);
    return id;
}

static bool accept_device(Parser *p, int *device)
{
    if (!accept(p, "device"))
        return false;
    *device = declared_device(p);
    return true;
}

static bool accept_span(Parser *p, Span *span)
{
    if (accept(p, "from"))
        span->from = seconds(p, "from");
    else if (accept(p, "until"))
        span->until = seconds(p, "until");
    else
        return false;
    return true;
}

/* ---- Devices ---- */

static bool uuid_read(const char *text, uint8_t bytes[16])
{
    unsigned b[16];
    int used = 0;
    int found = sscanf(text, "GPU-%2x%2x%2x%2x-%2x%2x-%2x%2x-%2x%2x-%2x%2x%2x%2x%2x%2x%n", &b[0], &b[1],
                       &b[2], &b[3], &b[4], &b[5], &b[6], &b[7], &b[8], &b[9], &b[10], &b[11], &b[12],
                       &b[13], &b[14], &b[15], &used);
    if (found != 16 || used != 40 || text[used])
        return false;
    for (int i = 0; i < 16; i++)
        bytes[i] = (uint8_t)b[i];
    return true;
}

static void parse_device(Parser *p)
{
    int id = device_id(p);
    if (p->s->devices[id])
        fail(p, "device %d twice", id);
    Device *d = p->s->devices[id] = must(calloc(1, sizeof *d));
    p->s->order[p->s->device_count++] = id;
    char uuid[64]; /* by default that of fake_nvml */
    snprintf(uuid, sizeof uuid, "GPU-00000000-aaaa-bbbb-cccc-%012d", id);
    *d = (Device){.id = id, .uuid = must(strdup(uuid)), .name = "NVIDIA H200", .chip = "GH100",
                  .sysclk = 1.5e9, .bytes_per_window = 16128};
    while (peek(p)) {
        if (accept(p, "uuid"))
            d->uuid = take_copy(p, "uuid");
        else if (accept(p, "name"))
            d->name = take_copy(p, "name");
        else if (accept(p, "chip"))
            d->chip = take_copy(p, "chip");
        else if (accept(p, "sysclk"))
            d->sysclk = whole(p, "sysclk", 1, 1e12);
        else if (accept(p, "offset_ns"))
            d->offset_ns = (int64_t)whole(p, "offset_ns", -1e18, 1e18);
        else if (accept(p, "bytes_per_window"))
            d->bytes_per_window = (uint64_t)whole(p, "bytes_per_window", 64, 1e12);
        else
            fail(p, "unknown key '%s'", peek(p));
    }
    if (!uuid_read(d->uuid, d->uuid_bytes))
        fail(p, "'%s' is no UUID like %s", d->uuid, uuid);
}

/* ---- Lines ---- */

/* `METRIC V`: V may end with /s. */
static void parse_value(Parser *p, int device, const Span *span)
{
    Value v = {.device = device, .metric = take_copy(p, "metric"), .span = *span};
    const char *word = take(p, "value");
    char *end;
    v.glob = strpbrk(v.metric, "*?[") != NULL;
    v.value = strtod(word, &end);
    v.rate = strcmp(end, "/s") == 0;
    if (end == word || (*end && !v.rate))
        fail(p, "value: '%s' is no number, with or without /s", word);
    *APPEND(p->s->values, p->s->value_count) = v;
}

static void parse_values(Parser *p, Span span)
{
    int first = p->s->value_count;
    int device = accept(p, "*") ? ANY_DEVICE : declared_device(p);
    do
        parse_value(p, device, &span);
    while (peek(p) && strcmp(peek(p), "from") != 0 && strcmp(peek(p), "until") != 0);
    while (accept_span(p, &span))
        ;
    for (int i = first; i < p->s->value_count; i++)
        p->s->values[i].span = span;
}

static void parse_phase(Parser *p)
{
    Span span = ALWAYS;
    span.from = seconds(p, "time");
    parse_values(p, span);
}

static bool some_function_matches(const char *pattern)
{
    for (int i = 0; i < FUNCTIONS; i++)
        if (fnmatch(pattern, FUNCTION_NAMES[i], 0) == 0)
            return true;
    return false;
}

static void parse_action(Parser *p, Fault *f)
{
    static const char *const words[] = {"hang", "crash", "exit", "oom", "latency"};
    static const Action actions[] = {ACT_HANG, ACT_CRASH, ACT_EXIT, ACT_KILLED, ACT_LATENCY};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (!accept(p, words[i]))
            continue;
        f->action = actions[i];
        if (f->action == ACT_EXIT)
            f->code = (int)whole(p, "exit", 0, 255);
        if (f->action == ACT_LATENCY)
            f->latency = seconds(p, "latency");
        return;
    }
    f->action = ACT_CODE;
    f->code = (int)whole(p, "code, hang, crash, exit, oom or latency", 0, 1e6);
}

static void parse_fault(Parser *p)
{
    Fault *f = APPEND(p->s->faults, p->s->fault_count);
    *f = (Fault){.text = must(strdup(p->text)), .function = take_copy(p, "function"),
                 .device = ANY_DEVICE, .times = UINT64_MAX, .span = ALWAYS,
                 .seen = must(calloc(1, sizeof *f->seen))};
    if (!some_function_matches(f->function))
        fail(p, "the fake has no function '%s'", f->function);
    bool acts = false;
    while (peek(p)) {
        if (accept_device(p, &f->device) || accept_span(p, &f->span))
            continue;
        if (accept(p, "times"))
            f->times = (uint64_t)whole(p, "times", 0, 1e15);
        else if (accept(p, "after_calls"))
            f->after = (uint64_t)whole(p, "after_calls", 0, 1e15);
        else if (!acts) {
            parse_action(p, f);
            acts = true;
        } else
            fail(p, "'%s' not understood", peek(p));
    }
    if (!acts)
        fail(p, "code, hang, crash, exit, oom or latency expected");
}

static void parse_quirk(Parser *p, QuirkKind kind)
{
    Quirk q = {.kind = kind, .device = ANY_DEVICE, .span = ALWAYS};
    switch (kind) {
    case Q_flood: q.when = take_copy(p, "metric"); break;
    case Q_unknown_metric: q.when = take_copy(p, "metric"); q.number = INVALID_PARAMETER; break;
    case Q_drop:
    case Q_duplicate: expect(p, "every"); q.number = (uint64_t)whole(p, "every", 1, 1e15); break;
    case Q_stop_reason: q.number = (uint64_t)whole(p, "stop_reason", 0, 1e6); break;
    case Q_passes: q.number = (uint64_t)whole(p, "passes", 1, 1e6); break;
    default: break;
    }
    bool of_gpu = kind != Q_passes && kind != Q_unknown_metric; /* these come before any GPU */
    while (peek(p)) {
        if ((of_gpu && accept_device(p, &q.device)) || accept_span(p, &q.span))
            continue;
        if (kind == Q_unknown_metric && accept(p, "chip"))
            q.chip = take_copy(p, "chip");
        else if (kind == Q_unknown_metric && accept(p, "code"))
            q.number = (uint64_t)whole(p, "code", 1, 1e6);
        else if (!q.when && accept(p, "when"))
            q.when = take_copy(p, "metric");
        else
            fail(p, "'%s' not understood", peek(p));
    }
    *APPEND(p->s->quirks, p->s->quirk_count) = q;
}

static void parse_chips(Parser *p)
{
    p->s->chip_count = 0;
    p->s->chips = NULL;
    while (peek(p))
        *APPEND(p->s->chips, p->s->chip_count) = take_copy(p, "chip");
}

/* Whether the word is the second of two. */
static bool second_of(Parser *p, const char *first, const char *second)
{
    if (accept(p, second))
        return true;
    expect(p, first);
    return false;
}

static BusyAt busy_at(Parser *p)
{
    if (accept(p, "enable"))
        return BUSY_AT_ENABLE;
    return second_of(p, "setconfig", "start") ? BUSY_AT_START : BUSY_AT_SETCONFIG;
}

static void parse_line(Parser *p)
{
    Scenario *s = p->s;
    for (int kind = 0; kind < QUIRKS; kind++)
        if (accept(p, QUIRK_NAMES[kind])) {
            parse_quirk(p, (QuirkKind)kind);
            return;
        }
    if (accept(p, "version"))
        s->version = (uint32_t)whole(p, "version", 0, 1e9);
    else if (accept(p, "driver_cuda"))
        s->driver_cuda = (int)whole(p, "driver_cuda", 0, 1e9);
    else if (accept(p, "max_metrics"))
        s->max_metrics = (uint64_t)whole(p, "max_metrics", 1, 1e6);
    else if (accept(p, "busy_at"))
        s->busy_at = busy_at(p);
    else if (accept(p, "full_image"))
        s->full_image_keeps = second_of(p, "drops", "keeps");
    else if (accept(p, "first_sample"))
        s->clean_first_sample = second_of(p, "garbage", "clean");
    else if (accept(p, "costs"))
        s->free_of_charge = second_of(p, "real", "none");
    else if (accept(p, "chips"))
        parse_chips(p);
    else if (accept(p, "device"))
        parse_device(p);
    else if (accept(p, "value"))
        parse_values(p, ALWAYS);
    else if (accept(p, "phase"))
        parse_phase(p);
    else if (accept(p, "fault"))
        parse_fault(p);
    else
        fail(p, "unknown word '%s'", peek(p));
}

/* Splits a line at blanks; "double quotes" keep blanks; # begins a comment. */
static void split(Parser *p, char *line)
{
    p->count = p->at = 0;
    for (char *c = line;;) {
        while (*c == ' ' || *c == '\t' || *c == '\n' || *c == '\r')
            c++;
        if (!*c || *c == '#')
            return;
        if (p->count == MAX_WORDS)
            fail(p, "too many words");
        bool quoted = *c == '"';
        p->words[p->count++] = c += quoted;
        while (*c && (quoted ? *c != '"' : !strchr(" \t\r\n", *c)))
            c++;
        if (quoted && !*c)
            fail(p, "quote not closed");
        if (*c)
            *c++ = '\0';
    }
}

Scenario *scenario_parse(const char *path, char *error, size_t size)
{
    Parser *p = must(calloc(1, sizeof *p));
    Scenario *s = p->s = must(calloc(1, sizeof *s));
    p->path = path;
    p->error = error;
    p->size = size;
    *s = (Scenario){.version = 28, .driver_cuda = 13000, .max_metrics = 248, .busy_at = BUSY_AT_SETCONFIG,
                    .chips = DEFAULT_CHIPS,
                    .chip_count = sizeof DEFAULT_CHIPS / sizeof *DEFAULT_CHIPS};
    FILE *file = fopen(path, "re");
    if (!file) {
        snprintf(error, size, "%s: %s", path, strerror(errno));
        return NULL;
    }
    if (setjmp(p->failed)) {
        fclose(file);
        return NULL;
    }
    char line[4096], words[4096];
    while (fgets(line, sizeof line, file)) {
        p->line++;
        strcpy(words, line);
        line[strcspn(line, "\r\n")] = '\0';
        p->text = line;
        split(p, words);
        if (p->count)
            parse_line(p);
        if (peek(p))
            fail(p, "'%s' not understood", peek(p));
    }
    fclose(file);
    free(p);
    return s;
}

/* ---- Look-ups ---- */

void scenario_carry(const Scenario *old, Scenario *next, double t)
{
    next->before = old;
    next->since = t;
    for (int i = 0; i < next->fault_count; i++)
        for (int o = 0; o < old->fault_count; o++)
            if (strcmp(next->faults[i].text, old->faults[o].text) == 0)
                next->faults[i].seen = old->faults[o].seen;
}

const Scenario *scenario_at(const Scenario *s, double t)
{
    while (s && s->before && t < s->since)
        s = s->before;
    return s;
}

bool span_holds(const Span *span, double t) { return t >= span->from && t < span->until; }

double metric_value(const Scenario *s, int device, const char *metric, double t, double seconds)
{
    for (int i = s->value_count - 1; i >= 0; i--) { /* the last line that fits wins */
        const Value *v = &s->values[i];
        if ((v->device == ANY_DEVICE || v->device == device) && span_holds(&v->span, t) &&
            (v->glob ? fnmatch(v->metric, metric, 0) : strcmp(v->metric, metric)) == 0)
            return v->rate ? v->value * seconds : v->value;
    }
    return 0;
}

static bool some_metric_matches(const char *pattern, const Names *metrics)
{
    for (size_t i = 0; i < metrics->count; i++)
        if (fnmatch(pattern, metrics->names[i], 0) == 0)
            return true;
    return false;
}

const Quirk *quirk_find(const Scenario *s, QuirkKind kind, int device, const char *chip,
                        const Names *metrics, double t)
{
    for (int i = 0; i < s->quirk_count; i++) {
        const Quirk *q = &s->quirks[i];
        if (q->kind == kind && (q->device == ANY_DEVICE || q->device == device) &&
            (!q->chip || (chip && fnmatch(q->chip, chip, 0) == 0)) && span_holds(&q->span, t) &&
            (!q->when || some_metric_matches(q->when, metrics)))
            return q;
    }
    return NULL;
}
