/* The scenario file: parser and defaults. */
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nvml.h"

#define NUM(k, v) #k,
#define NONE(k) #k,
#define AUTO(k) #k,
#define TEXT(k)
static const char *const KEY_NAMES[KEYS] = {
#include "keys.def"
};
#undef NUM
#undef NONE
#undef AUTO
#undef TEXT
#define NUM(k, v) {v, OK},
#define NONE(k) {0, NOT_SUPPORTED},
#define AUTO(k) {0, RET_AUTO},
#define TEXT(k)
static const Value KEY_DEFAULTS[KEYS] = {
#include "keys.def"
};
#undef NUM
#undef NONE
#undef AUTO
#undef TEXT
#define NUM(k, v)
#define NONE(k)
#define AUTO(k)
#define TEXT(k) #k,
static const char *const TEXT_NAMES[TEXTS] = {
#include "keys.def"
};
#undef NUM
#undef NONE
#undef AUTO
#undef TEXT
#define FN(name, flags) #name,
static const char *const FUNCTION_NAMES[FUNCTIONS] = {
#include "functions.def"
};
#undef FN
static const char *const LINK_NAMES[LINK_ATTRS] = {"state",    "speed",    "version",  "replay",
                                                   "recovery", "crc_flit", "crc_data", "ecc_data"};

enum { MAX_WORDS = 256 };
typedef struct {
    Scenario *s;
    char *words[MAX_WORDS];
    int count, at, line;
    Entity *block;
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

static void *must(void *memory)
{
    if (!memory)
        abort();
    return memory;
}

/* Makes room for one more item and returns it, zeroed. */
#define APPEND(array, count) \
    ((array) = must(realloc((array), sizeof *(array) * (size_t)((count) + 1))), \
     memset(&(array)[count], 0, sizeof *(array)), &(array)[(count)++])

/* ---- Words ---- */

static const char *peek(const Parser *p) { return p->at < p->count ? p->words[p->at] : NULL; }

static const char *take(Parser *p, const char *what)
{
    if (p->at >= p->count)
        fail(p, "%s expected at the end of the line", what);
    return p->words[p->at++];
}

static bool accept(Parser *p, const char *word)
{
    if (!peek(p) || strcmp(peek(p), word) != 0)
        return false;
    p->at++;
    return true;
}

static bool read_number(const char *word, long double *out)
{
    if (strcmp(word, "U64NA") == 0) { *out = UINT64_MAX; return true; }
    if (strcmp(word, "U32NA") == 0) { *out = UINT32_MAX; return true; }
    char *end;
    *out = strtold(word, &end);
    return end != word && *end == '\0';
}

static long double number(Parser *p, const char *what)
{
    const char *word = take(p, what);
    long double v;
    if (!read_number(word, &v))
        fail(p, "%s: '%s' is no number", what, word);
    return v;
}

static long double whole(Parser *p, const char *what, long double low, long double high)
{
    long double v = number(p, what);
    if (!(v >= low && v <= high) || v != floorl(v))
        fail(p, "%s: not a whole number in %.0Lf..%.0Lf", what, low, high);
    return v;
}

static double seconds(Parser *p, const char *what)
{
    double v = (double)number(p, what);
    if (!(v >= 0))
        fail(p, "%s: negative", what);
    return v;
}

static Value value(Parser *p, const char *what)
{
    const char *word = take(p, what);
    Value v = {0, OK};
    if (strcmp(word, "none") == 0)
        v.ret = NOT_SUPPORTED;
    else if (strcmp(word, "auto") == 0)
        v.ret = RET_AUTO;
    else if (word[0] == '!') {
        char *end;
        v.ret = (int)strtol(word + 1, &end, 10);
        if (*end || end == word + 1 || v.ret <= 0)
            fail(p, "%s: '%s' is no return code", what, word);
    } else if (!read_number(word, &v.v))
        fail(p, "%s: '%s' is no value", what, word);
    return v;
}

static int find(const char *const *names, int count, const char *word)
{
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], word) == 0)
            return i;
    return -1;
}

static int device_id(Parser *p) { return (int)whole(p, "device", 0, MAX_DEVICES - 1); }

static bool accept_target(Parser *p, Target *target)
{
    Target t = {AT_ANY, 0, -1, -1};
    if (accept(p, "device"))
        t.where = AT_DEVICE;
    else if (accept(p, "board"))
        t.where = AT_BOARD;
    else if (accept(p, "mig"))
        t.where = AT_MIG;
    else
        return false;
    t.device = device_id(p);
    if (!p->s->devices[t.device])
        fail(p, "device %d is not declared above", t.device);
    if (t.where == AT_MIG) {
        if (!accept(p, "gi"))
            fail(p, "'gi N' expected");
        t.gi = (int)whole(p, "gi", 0, 1e6L);
        if (accept(p, "ci"))
            t.ci = (int)whole(p, "ci", 0, 1e6L);
        if (!mig_find(p->s, t.device, t.gi, t.ci))
            fail(p, "no such MIG instance above");
    }
    *target = t;
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

static const Span ALWAYS = {0, INFINITY};

/* ---- Devices and MIG instances ---- */

static char *formatted(const char *format, ...)
{
    char buffer[160];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return must(strdup(buffer));
}

static Entity *entity_new(int device, int gi, int ci)
{
    Entity *e = must(calloc(1, sizeof *e));
    e->device = device;
    e->gi = gi;
    e->ci = ci;
    memcpy(e->base, KEY_DEFAULTS, sizeof e->base);
    for (int i = 0; i < MAX_LINKS; i++)
        for (int a = 0; a < LINK_ATTRS; a++)
            e->link[i][a].ret = RET_AUTO;
    return e;
}

static char *rest_of_line(Parser *p)
{
    char buffer[160] = "";
    for (take(p, "text"), p->at--; p->at < p->count; p->at++) {
        size_t used = strlen(buffer);
        snprintf(buffer + used, sizeof buffer - used, "%s%s", used ? " " : "", p->words[p->at]);
    }
    return must(strdup(buffer));
}

/* `key value` pairs; a text key that begins a line of a block takes the rest of the line. */
static void pairs(Parser *p, Entity *e)
{
    bool first = p->at == 0;
    for (; peek(p); first = false) {
        const char *word = take(p, "key");
        int key = find(KEY_NAMES, KEYS, word);
        int text = find(TEXT_NAMES, TEXTS, word);
        if (key >= 0)
            e->base[key] = value(p, word);
        else if (text >= 0)
            e->text[text] = first ? rest_of_line(p) : must(strdup(take(p, word)));
        else
            fail(p, "unknown key '%s'", word);
    }
}

static void parse_device(Parser *p)
{
    int id = device_id(p);
    if (p->s->devices[id])
        fail(p, "device %d twice", id);
    p->block = p->s->devices[id] = entity_new(id, -1, -1);
    if (!p->s->ordered)
        p->s->order[p->s->order_count++] = id;
    pairs(p, p->block);
}

static void parse_mig(Parser *p)
{
    int id = device_id(p);
    if (!p->s->devices[id])
        fail(p, "device %d is not declared above", id);
    if (!accept(p, "gi"))
        fail(p, "'gi N' expected");
    int gi = (int)whole(p, "gi", 0, 1e6L);
    int ci = accept(p, "ci") ? (int)whole(p, "ci", 0, 1e6L) : 0;
    int *count = &p->s->mig_count[id];
    if (*count == MAX_MIG || mig_find(p->s, id, gi, ci))
        fail(p, "too many MIG instances, or one twice");
    p->block = p->s->migs[id][(*count)++] = entity_new(id, gi, ci);
    p->block->base[K_profile_slices].v = 1;
    pairs(p, p->block);
}

static bool set(const Value *v) { return v->ret != RET_AUTO; }

static void settle(Value *v, long double computed)
{
    if (!set(v))
        *v = (Value){computed, OK};
}

static void default_text(Entity *e, TextKey key, char *text)
{
    if (e->text[key])
        free(text);
    else
        e->text[key] = text;
}

static void finish_device(Entity *d)
{
    int id = d->device;
    settle(&d->base[K_memory_total], 150754820096.0L);
    settle(&d->base[K_memory_reserved], 640679936.0L);
    settle(&d->base[K_minor], id);
    settle(&d->base[K_sm_count], 132);
    default_text(d, T_uuid, formatted("GPU-00000000-aaaa-bbbb-cccc-%012d", id));
    default_text(d, T_name, formatted("NVIDIA H200"));
    default_text(d, T_compute_capability, formatted("9.0"));
    default_text(d, T_pci_bus_id, formatted("00000000:%02X:00.0", 0x17 + id * 7));
    default_text(d, T_serial, formatted("16500000000%02d", id));
    default_text(d, T_vbios, formatted("96.00.A5.00.01"));
}

static void finish_mig(Entity *m, const Entity *parent)
{
    long double slices = m->base[K_profile_slices].v;
    long double share = slices >= 7 ? 1 : slices / 8;
    settle(&m->base[K_memory_total], floorl(parent->base[K_memory_total].v * share));
    settle(&m->base[K_memory_reserved], 0);
    settle(&m->base[K_sm_count], floorl(parent->base[K_sm_count].v * slices / 7));
    settle(&m->base[K_ci_slices], slices);
    default_text(m, T_uuid, formatted("MIG-00000000-aaaa-bbbb-cccc-%012x",
                                      (unsigned)(m->device * 65536 + m->ci * 256 + 0xa0 + m->gi)));
    default_text(m, T_name, formatted("%s MIG %.0Lfg.%.0Lfgb", parent->text[T_name], slices,
                                      ceill(m->base[K_memory_total].v / 1073741824.0L)));
    for (int t = 0; t < TEXTS; t++)
        default_text(m, (TextKey)t, must(strdup(parent->text[t])));
    m->base[K_architecture] = parent->base[K_architecture];
}

/* ---- Lines ---- */

static void add_step(Entity *e, double t, Key key, Value v)
{
    APPEND(e->steps, e->step_count);
    int i = e->step_count - 1;
    for (; i > 0 && e->steps[i - 1].t > t; i--)
        e->steps[i] = e->steps[i - 1];
    e->steps[i] = (Step){t, key, v};
}

static void add_wave(Entity *e, Key key, double step, const Value *values, int count)
{
    Wave *w = APPEND(e->waves, e->wave_count);
    *w = (Wave){key, step, count, must(malloc(sizeof *values * (size_t)count))};
    memcpy(w->values, values, sizeof *values * (size_t)count);
}

static Key key_word(Parser *p)
{
    const char *word = take(p, "key");
    int key = find(KEY_NAMES, KEYS, word);
    if (key < 0)
        fail(p, "unknown key '%s'", word);
    return (Key)key;
}

static void parse_phase(Parser *p)
{
    double t = seconds(p, "time");
    Target target = {AT_ANY, 0, -1, -1};
    accept_target(p, &target);
    do {
        Key key = key_word(p);
        Value v = value(p, "value");
        for (Entity **e = scenario_entities(p->s, &target); *e; e++)
            add_step(*e, t, key, v);
    } while (peek(p));
}

static void parse_wave(Parser *p)
{
    Target target = {AT_ANY, 0, -1, -1};
    accept_target(p, &target);
    Key key = key_word(p);
    if (!accept(p, "step"))
        fail(p, "'step SECONDS' expected");
    double step = seconds(p, "step");
    Value values[MAX_WORDS];
    int count = 0;
    do
        values[count++] = value(p, "value");
    while (peek(p));
    if (step <= 0)
        fail(p, "step must be positive");
    for (Entity **e = scenario_entities(p->s, &target); *e; e++)
        add_wave(*e, key, step, values, count);
}

static bool some_function_matches(const char *pattern)
{
    for (int i = 0; i < FUNCTIONS; i++)
        if (fnmatch(pattern, FUNCTION_NAMES[i], 0) == 0)
            return true;
    return false;
}

static void parse_fault(Parser *p)
{
    Fault *f = APPEND(p->s->faults, p->s->fault_count);
    f->text = must(strdup(p->text));
    f->function = must(strdup(take(p, "function")));
    if (!some_function_matches(f->function))
        fail(p, "the fake has no function '%s'", f->function);
    f->target = (Target){AT_ANY, 0, -1, -1};
    f->times = UINT64_MAX;
    f->span = ALWAYS;
    f->seen = must(calloc(1, sizeof *f->seen));
    bool acts = false;
    while (peek(p)) {
        if (accept_target(p, &f->target) || accept_span(p, &f->span))
            continue;
        if (accept(p, "times")) { f->times = (uint64_t)whole(p, "times", 0, 1e15L); continue; }
        if (accept(p, "after_calls")) {
            f->after = (uint64_t)whole(p, "after_calls", 0, 1e15L);
            continue;
        }
        if (acts)
            fail(p, "'%s' not understood", peek(p));
        acts = true;
        if (accept(p, "hang"))
            f->action = ACT_HANG;
        else if (accept(p, "crash"))
            f->action = ACT_CRASH;
        else if (accept(p, "latency")) {
            f->action = ACT_LATENCY;
            f->latency = seconds(p, "latency");
        } else
            f->code = (int)whole(p, "code, hang, crash or latency", 0, 1e6L);
    }
    if (!acts)
        fail(p, "code, hang, crash or latency expected");
}

static void parse_override(Parser *p, bool field)
{
    Override *o = field ? APPEND(p->s->fields, p->s->field_count) : APPEND(p->s->gpms, p->s->gpm_count);
    *o = (Override){.target = {AT_ANY, 0, -1, -1}, .any_scope = true, .span = ALWAYS, .type = TYPE_U32};
    o->id = (uint32_t)whole(p, "id", 0, UINT32_MAX);
    bool given = false, typed = false;
    static const char *const types[] = {"double", "u32", "ulong", "u64", "s64", "s32", "u16"};
    while (peek(p)) {
        if (accept_target(p, &o->target) || accept_span(p, &o->span))
            continue;
        if (field && accept(p, "scope")) {
            o->any_scope = false;
            o->scope = (uint32_t)whole(p, "scope", 0, UINT32_MAX);
        } else if (field && accept(p, "type")) {
            int type = find(types, 7, take(p, "type"));
            if (type < 0)
                fail(p, "type is double, u32, ulong, u64, s64, s32 or u16");
            o->type = (ValueType)type;
            typed = true;
        } else if (!given) {
            o->value = value(p, "value");
            given = true;
        } else
            fail(p, "'%s' not understood", peek(p));
    }
    if (!given)
        fail(p, "value expected");
    if (!typed && o->value.v > UINT32_MAX)
        o->type = TYPE_U64;
}

static void parse_link(Parser *p)
{
    int link = (int)whole(p, "link", 0, MAX_LINKS - 1);
    Target target = {AT_ANY, 0, -1, -1};
    accept_target(p, &target);
    do {
        const char *word = take(p, "link attribute");
        int attr = find(LINK_NAMES, LINK_ATTRS, word);
        if (attr < 0)
            fail(p, "unknown link attribute '%s'", word);
        Value v = value(p, word);
        for (Entity **e = scenario_entities(p->s, &target); *e; e++)
            (*e)->link[link][attr] = v;
    } while (peek(p));
}

static void parse_process(Parser *p)
{
    Process *q = APPEND(p->s->processes, p->s->process_count);
    *q = (Process){.gi = U32NA, .ci = U32NA, .span = ALWAYS};
    q->device = device_id(p);
    if (!p->s->devices[q->device])
        fail(p, "device %d is not declared above", q->device);
    bool pid = false;
    while (peek(p)) {
        static const char *const types[] = {"compute", "graphics", "mps"};
        if (accept_span(p, &q->span))
            continue;
        const char *word = take(p, "key");
        if (strcmp(word, "type") == 0) {
            int type = find(types, 3, take(p, "type"));
            if (type < 0)
                fail(p, "type is compute, graphics or mps");
            q->type = (ProcessType)type;
        } else if (strcmp(word, "memory") == 0)
            q->memory = (uint64_t)whole(p, word, 0, UINT64_MAX);
        else {
            static const char *const names[] = {"pid", "gi", "ci", "sm", "mem", "enc", "dec"};
            uint32_t *const places[] = {&q->pid, &q->gi, &q->ci, &q->sm, &q->mem, &q->enc, &q->dec};
            int i = find(names, 7, word);
            if (i < 0)
                fail(p, "unknown process key '%s'", word);
            *places[i] = (uint32_t)whole(p, word, 0, UINT32_MAX);
            pid = pid || i == 0;
            q->sampled = q->sampled || i >= 3;
        }
    }
    if (!pid)
        fail(p, "'pid N' expected");
}

static void parse_xid(Parser *p)
{
    Xid *x = APPEND(p->s->xids, p->s->xid_count);
    x->text = must(strdup(p->text));
    x->device = device_id(p);
    if (!p->s->devices[x->device])
        fail(p, "device %d is not declared above", x->device);
    x->code = (uint64_t)whole(p, "Xid", 0, UINT32_MAX);
    x->gi = accept(p, "gi") ? (uint32_t)whole(p, "gi", 0, UINT32_MAX) : U32NA;
    if ((x->timed = accept(p, "at")))
        x->at = seconds(p, "at");
}

static void parse_order(Parser *p)
{
    p->s->ordered = true;
    p->s->order_count = 0;
    while (peek(p)) {
        if (p->s->order_count == MAX_DEVICES)
            fail(p, "too many devices");
        p->s->order[p->s->order_count++] = device_id(p);
    }
}

static void parse_line(Parser *p)
{
    static const char *const keywords[] = {
        "driver_version", "nvml_version", "cuda_version", "gpm_refresh", "process_stride", "count",
        "order", "device", "mig", "phase", "wave", "fault", "gpm", "field", "link", "process", "xid"};
    Scenario *s = p->s;
    switch (find(keywords, 17, peek(p))) {
    case 0: p->at++; snprintf(s->driver_version, 80, "%s", take(p, "version")); break;
    case 1: p->at++; snprintf(s->nvml_version, 80, "%s", take(p, "version")); break;
    case 2: p->at++; s->cuda_version = (int)whole(p, "version", 0, 1e6L); break;
    case 3: p->at++; s->gpm_refresh = seconds(p, "gpm_refresh"); break;
    case 4: p->at++; s->process_stride = (unsigned)whole(p, "process_stride", 16, 64); break;
    case 5: p->at++; s->count = value(p, "count"); break;
    case 6: p->at++; parse_order(p); break;
    case 7: p->at++; parse_device(p); break;
    case 8: p->at++; parse_mig(p); break;
    case 9: p->at++; parse_phase(p); break;
    case 10: p->at++; parse_wave(p); break;
    case 11: p->at++; parse_fault(p); break;
    case 12: p->at++; parse_override(p, false); break;
    case 13: p->at++; parse_override(p, true); break;
    case 14: p->at++; parse_link(p); break;
    case 15: p->at++; parse_process(p); break;
    case 16: p->at++; parse_xid(p); break;
    default:
        if (!p->block)
            fail(p, "unknown word '%s'", peek(p));
        pairs(p, p->block);
    }
    if (peek(p))
        fail(p, "'%s' not understood", peek(p));
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

static void finish(Parser *p)
{
    Scenario *s = p->s;
    for (int d = 0; d < MAX_DEVICES; d++) {
        if (!s->devices[d])
            continue;
        finish_device(s->devices[d]);
        for (int m = 0; m < s->mig_count[d]; m++)
            finish_mig(s->migs[d][m], s->devices[d]);
    }
    for (int i = 0; i < s->order_count; i++)
        if (!s->devices[s->order[i]])
            fail(p, "order names device %d, which is not declared", s->order[i]);
}

Scenario *scenario_parse(const char *path, char *error, size_t size)
{
    Parser *p = must(calloc(1, sizeof *p));
    Scenario *s = p->s = must(calloc(1, sizeof *s));
    p->path = path;
    p->error = error;
    p->size = size;
    *s = (Scenario){.driver_version = "580.159.04", .nvml_version = "13.580.159.04",
                    .cuda_version = 13000, .gpm_refresh = 0.1, .process_stride = 24,
                    .count = {0, RET_AUTO}};
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
    }
    finish(p);
    fclose(file);
    free(p);
    return s;
}
