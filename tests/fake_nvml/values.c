/* Values over time: phases, waves, their exact integrals, and what a rewritten scenario keeps. */
#include <math.h>
#include <string.h>

#include "fake_nvml.h"

bool target_matches(const Target *target, const Entity *e)
{
    if (target->where == AT_ANY)
        return true;
    if (!e || e->device != target->device)
        return false;
    switch (target->where) {
    case AT_DEVICE: return e->gi < 0;
    case AT_MIG:
        return e->gi >= 0 && e->gi == target->gi && (target->ci < 0 || e->ci == target->ci);
    default: return true;
    }
}

bool span_holds(const Span *span, double t) { return t >= span->from && t < span->until; }

static const Wave *wave_of(const Entity *e, Key key)
{
    for (int i = e->wave_count - 1; i >= 0; i--)
        if (e->waves[i].key == key)
            return &e->waves[i];
    return NULL;
}

Value value_at(const Entity *e, Key key, double t)
{
    const Wave *w = wave_of(e, key);
    if (w)
        return w->values[(uint64_t)(t / w->step) % (uint64_t)w->count];
    Value v = e->base[key];
    for (int i = 0; i < e->step_count && e->steps[i].t <= t; i++)
        if (e->steps[i].key == key)
            v = e->steps[i].value;
    return v;
}

static long double number(Value v) { return v.ret != OK || isnan(v.v) ? 0 : v.v; }

static long double wave_integral(const Wave *w, double t)
{
    long double cycle = 0;
    for (int i = 0; i < w->count; i++)
        cycle += number(w->values[i]) * w->step;
    double length = w->step * w->count;
    double whole = floor(t / length);
    double rest = t - whole * length;
    long double sum = cycle * whole;
    for (int i = 0; i < w->count && rest > 0; i++, rest -= w->step)
        sum += number(w->values[i]) * fmin(rest, w->step);
    return sum;
}

long double integral_at(const Entity *e, Key key, double t)
{
    const Wave *w = wave_of(e, key);
    if (w)
        return e->offset[key] + wave_integral(w, t);
    long double sum = e->offset[key];
    Value v = e->base[key];
    double since = 0;
    for (int i = 0; i < e->step_count && e->steps[i].t < t; i++) {
        if (e->steps[i].key != key)
            continue;
        sum += number(v) * (e->steps[i].t - since);
        since = e->steps[i].t;
        v = e->steps[i].value;
    }
    return sum + number(v) * (t - since);
}

const Override *override_find(const Override *list, int count, uint32_t id, uint32_t scope,
                              const Entity *e, double t)
{
    for (int i = count - 1; i >= 0; i--) /* the last line wins */
        if (list[i].id == id && (list[i].any_scope || list[i].scope == scope) &&
            target_matches(&list[i].target, e) && span_holds(&list[i].span, t))
            return &list[i];
    return NULL;
}

Entity **scenario_entities(const Scenario *s, const Target *target)
{
    static _Thread_local Entity *found[MAX_DEVICES * (MAX_MIG + 1) + 1];
    int n = 0;
    for (int d = 0; d < MAX_DEVICES; d++) {
        if (s->devices[d] && target_matches(target, s->devices[d]))
            found[n++] = s->devices[d];
        for (int m = 0; m < s->mig_count[d]; m++)
            if (target_matches(target, s->migs[d][m]))
                found[n++] = s->migs[d][m];
    }
    found[n] = NULL;
    return found;
}

/* ---- Rewrites ---- */

static Entity *counterpart(const Scenario *s, const Entity *e)
{
    if (e->gi < 0)
        return s->devices[e->device];
    return (Entity *)(uintptr_t)mig_find(s, e->device, e->gi, e->ci);
}

static void carry_faults(const Scenario *old, Scenario *next)
{
    bool used[1024] = {false};
    for (int i = 0; i < next->fault_count; i++)
        for (int j = 0; j < old->fault_count && j < 1024; j++)
            if (!used[j] && strcmp(next->faults[i].text, old->faults[j].text) == 0) {
                used[j] = true;
                next->faults[i].seen = old->faults[j].seen;
                break;
            }
}

static void carry_xids(const Scenario *old, Scenario *next, double t)
{
    bool used[1024] = {false};
    for (int i = 0; i < next->xid_count; i++) {
        Xid *x = &next->xids[i];
        if (x->timed)
            continue;
        x->at = t;
        for (int j = 0; j < old->xid_count && j < 1024; j++)
            if (!used[j] && strcmp(x->text, old->xids[j].text) == 0) {
                used[j] = true;
                x->at = old->xids[j].at;
                break;
            }
    }
}

void scenario_carry(const Scenario *old, Scenario *next, double t)
{
    Target any = {AT_ANY, 0, -1, -1};
    next->before = old;
    next->since = t;
    for (Entity **e = scenario_entities(next, &any); *e; e++) {
        const Entity *before = counterpart(old, *e);
        for (int k = 0; before && k < KEYS; k++)
            (*e)->offset[k] = integral_at(before, (Key)k, t) - integral_at(*e, (Key)k, t);
    }
    carry_faults(old, next);
    carry_xids(old, next, t);
}

const Scenario *scenario_at(const Scenario *s, double t)
{
    while (s && s->before && t < s->since)
        s = s->before;
    return s;
}
