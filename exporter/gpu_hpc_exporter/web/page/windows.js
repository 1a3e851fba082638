// The windows of one GPU that this page knows, and the stretch of time that it shows.

/** @typedef {"sm" | "l2" | "dram" | "pcie" | "nvlink"} Unit */
/** @typedef {Unit | "sm_active" | "nvml_utilization"} Column */
/**
 * @typedef {{end_seconds: number[], duration_seconds: number[], bottleneck: string[]}
 *   & Record<Column, (number | null)[]>} WindowColumns
 */

/** @type {Unit[]} */
export const UNITS = ["sm", "l2", "dram", "pcie", "nvlink"];
/** @type {Column[]} */
const COLUMNS = [...UNITS, "sm_active", "nvml_utilization"];

/** Classes in the order of a stack, with the colours that the dashboards use. @type {[string, string][]} */
export const CLASSES = [
  ["compute_bound", "#37872d"],
  ["mixed", "#73bf69"],
  ["dram_bound", "#ff9830"],
  ["l2_bound", "#fade2a"],
  ["l2_thrash", "#e0b400"],
  ["pcie_bound", "#5794f2"],
  ["nvlink_bound", "#1f60c4"],
  ["copy_only", "#8ab8ff"],
  ["latency_bound", "#b4a26a"],
  ["starved", "#f2495c"],
  ["throttled", "#c4162a"],
  ["media", "#b877d9"],
  ["idle", "#8e8e8e"],
  ["unknown", "#565c66"],
];
const NUMBERS = new Map(CLASSES.map(([name], number) => [name, number]));

export const LONGEST = 600;
/** Made once: making it anew for each label took most of a picture's time. */
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const ROOM = 8192;
const KEPT = 6100;

/** Windows in typed arrays: a few hundred kilobytes a GPU, however long the page stays open. */
export class Windows {
  constructor() {
    this.length = 0;
    this.isLoaded = false;
    /** Another number once what was known has been replaced. */
    this.revision = 0;
    this.end = new Float64Array(ROOM);
    this.duration = new Float32Array(ROOM);
    this.bottleneck = new Uint8Array(ROOM);
    /** NaN where not measured. @type {Record<Column, Float32Array>} */
    this.ratio = /** @type {any} */ (Object.fromEntries(COLUMNS.map((name) => [name, new Float32Array(ROOM)])));
  }

  /** @param {WindowColumns} columns */
  add(columns) {
    for (let i = 0; i < columns.end_seconds.length; i += 1) {
      if (this.length === ROOM) this.#compact();
      const at = this.length;
      this.end[at] = columns.end_seconds[i];
      this.duration[at] = columns.duration_seconds[i];
      this.bottleneck[at] = NUMBERS.get(columns.bottleneck[i]) ?? CLASSES.length - 1;
      for (const name of COLUMNS) this.ratio[name][at] = columns[name][i] ?? NaN;
      this.length += 1;
    }
  }

  /**
   * Everything anew, followed by those windows that came while it was asked for.
   * @param {WindowColumns} columns
   */
  load(columns) {
    const before = this.isLoaded ? null : this.#copyAfter(columns.end_seconds.at(-1) ?? -Infinity);
    this.length = 0;
    this.add(columns);
    if (before !== null) this.add(before);
    this.isLoaded = true;
    this.revision += 1;
  }

  forget() {
    this.length = 0;
    this.isLoaded = false;
    this.revision += 1;
  }

  /** When the newest window ended, -Infinity without one. */
  get newest() {
    return this.length === 0 ? -Infinity : this.end[this.length - 1];
  }

  /**
   * The first window that ends after `time`, as far as windows are in order.
   * @param {number} time
   */
  firstAfter(time) {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return Math.max(0, low - 2);
  }

  /**
   * The window that covers `time`, -1 where there is none.
   * @param {number} time
   */
  at(time) {
    for (let i = this.firstAfter(time); i < this.length; i += 1) {
      const begin = this.end[i] - this.duration[i];
      if (begin <= time && time < this.end[i]) return i;
      if (begin > time + 10) break;
    }
    return -1;
  }

  /**
   * Share of the seen time by class, in the order of CLASSES; null where nothing was seen.
   * @param {number} from
   * @param {number} to
   */
  shares(from, to) {
    const seconds = new Float64Array(CLASSES.length);
    let total = 0;
    for (let i = this.firstAfter(from); i < this.length; i += 1) {
      const part = Math.min(to, this.end[i]) - Math.max(from, this.end[i] - this.duration[i]);
      if (part > 0) {
        seconds[this.bottleneck[i]] += part;
        total += part;
      }
    }
    return total > 0 ? seconds.map((value) => value / total) : null;
  }

  /**
   * @param {number} time
   * @returns {WindowColumns}
   */
  #copyAfter(time) {
    /** @type {number[]} */
    const chosen = [];
    for (let i = 0; i < this.length; i += 1) if (this.end[i] > time) chosen.push(i);
    const ratios = COLUMNS.map((name) => [name, chosen.map((i) => this.ratio[name][i])]);
    return {
      end_seconds: chosen.map((i) => this.end[i]),
      duration_seconds: chosen.map((i) => this.duration[i]),
      bottleneck: chosen.map((i) => CLASSES[this.bottleneck[i]][0]),
      .../** @type {Record<Column, number[]>} */ (Object.fromEntries(ratios)),
    };
  }

  #compact() {
    const from = this.length - KEPT;
    for (const column of [this.end, this.duration, this.bottleneck, ...Object.values(this.ratio)]) {
      column.copyWithin(0, from, this.length);
    }
    this.length = KEPT;
  }
}

const LONGEST_DELAY = 1.5;
const STOPPED = 3;
const FRAMES = 25;

/**
 * How much later than now is shown, so that time goes on evenly and its end is never empty: as late as windows come,
 * which is with each frame, or ten at a time once a second where PM sampling leads.
 */
export class Delay {
  /** @type {number[]} */ #lags = [];
  seconds = LONGEST_DELAY;

  /**
   * Once a frame. Goes to what the last five seconds needed, so slowly that nobody sees time stumble.
   * @param {number[]} lags of the newest window of each GPU behind now, in seconds
   */
  note(lags) {
    const running = lags.filter((lag) => lag < STOPPED);
    if (running.length === 0) return;
    this.#lags.push(Math.max(...running));
    if (this.#lags.length > FRAMES) this.#lags.shift();
    const needed = Math.min(LONGEST_DELAY, Math.max(...this.#lags) + 0.1);
    this.seconds += Math.min(0.1, Math.max(-0.04, needed - this.seconds));
  }
}

/** What is shown: `span` seconds that end at `end`, or now where that is null. The same for all GPUs. */
export class View {
  constructor() {
    this.span = LONGEST;
    /** @type {number | null} */
    this.end = null;
    /** The exporter's clock, and Unix time minus that. */
    this.now = 0;
    this.unixOffset = 0;
    this.changed = () => {};
  }

  get to() {
    return this.end ?? this.now;
  }

  get from() {
    return this.to - this.span;
  }

  /**
   * @param {number} span
   * @param {number | null} end
   */
  show(span, end) {
    this.span = Math.min(LONGEST, Math.max(1, span));
    this.end = end === null || end >= this.now ? null : Math.max(end, this.now - LONGEST + this.span);
    this.changed();
  }

  /**
   * Zoom so that `time` stays where it is.
   * @param {number} factor
   * @param {number} time
   */
  zoom(factor, time) {
    const span = Math.min(LONGEST, Math.max(1, this.span * factor));
    this.show(span, this.to + (time - this.to) * (1 - span / this.span));
  }

  /**
   * The stretch of time that `wide` pixels show, moved to whole pixels: a picture is the same until one has passed.
   * @param {number} wide
   * @returns {[number, number]}
   */
  pixels(wide) {
    const step = this.span / wide;
    const to = Math.floor(this.to / step + 1e-6) * step;
    return [to - this.span, to];
  }

  /** @param {number} time */
  clock(time) {
    const date = new Date(1000 * (time + this.unixOffset));
    const text = CLOCK.format(date);
    return this.span <= 10 ? `${text}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, 1)}` : text;
  }
}
