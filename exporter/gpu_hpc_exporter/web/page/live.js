// The connection to the exporter: a stream of events that comes back by itself.

/** @typedef {import("./windows.js").WindowColumns} WindowColumns */
/** @typedef {{cause: string, sentence: string, advice: string, alert: string | null, also: Verdict[]}} Verdict */
/** @typedef {{source: string, state: string, reason: string, seconds: number}} Source */
/**
 * @typedef {{job: string, job_id: string, kind: string, user: string, namespace: string, pod: string, container: string,
 *   rank: string, source: string, processes: number, memory_bytes: number | null, sm_ratio: number | null,
 *   libraries: Record<string, string>}} Job
 */
/** @typedef {{pid: number, memory_bytes: number | null, sm_ratio: number | null}} Process */
/**
 * @typedef {{job: string, kernel: string, category: string, share_ratio: number, executions_per_second: number,
 *   mean_seconds: number, launch_latency_seconds: number | null, launch_latency_history_seconds: (number | null)[],
 *   pattern: string | null}} Kernel
 */
/**
 * @typedef {{job: string, direction: string, memory: string, bytes_per_second: number, copies_per_second: number,
 *   sizes: number[]}} Copy
 */
/**
 * @typedef {{gpu: string, uuid: string, name: string, profile: string, parent_uuid: string, verdict: Verdict,
 *   bottleneck_ratio: Record<string, number>, intensity_ratio: Record<string, number | null>,
 *   sm_active_ratio: number | null, sm_occupancy_ratio: number | null, sm_utilization_ratio: number | null,
 *   nvml_utilization_ratio: number | null, memory_used_bytes: number | null, memory_total_bytes: number | null,
 *   power_watts: number | null, power_limit_watts: number | null, temperature_celsius: number | null,
 *   clock_sm_hertz: number | null, jobs: Job[], job_count: number, processes: Process[] | null,
 *   process_count: number | null, kernels: Kernel[], copies: Copy[], sources: Source[]}} Gpu
 */
/**
 * @typedef {{version: string, now_seconds: number, unix_seconds: number, up: boolean, down_reason: string | null,
 *   down_advice: string | null, expected_gpus: number, recording: string | null, driver_version: string | null, gpus: Gpu[], lost: string[], sources: Source[],
 *   agents: Record<string, number> | null}} Gpus
 */
/** @typedef {{now_seconds: number, windows: Record<string, WindowColumns>}} NewWindows */
/** @typedef {{now_seconds: number, windows: WindowColumns}} History */
/**
 * @typedef {{gpus: (gpus: Gpus) => void, windows: (windows: NewWindows) => void, missed: () => void,
 *   state: (text: string, isLive: boolean) => void}} Listener
 */

const RETRY_MS = 2000;
/** Where the page is, without a name and password that may stand in its address: fetch refuses those. */
const HERE = location.origin + location.pathname;
const SILENCE_MS = 6000;

export class Connection {
  /** @type {Listener} */ #listener;
  /** @type {EventSource | null} */ #events = null;
  #heardAt = 0;

  /** @param {Listener} listener */
  constructor(listener) {
    this.#listener = listener;
    setInterval(() => this.#watch(), 1000);
    // A page in the background needs no frames: others may have its place.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    this.#open();
  }

  #open() {
    this.#close();
    const events = new EventSource(new URL("api/v1/events", HERE));
    this.#events = events;
    this.#heardAt = performance.now();
    events.addEventListener("open", () => {
      this.#listener.state("live", true);
      this.#listener.missed();
    });
    events.addEventListener("gpus", (event) => this.#hear(event, this.#listener.gpus));
    events.addEventListener("windows", (event) => this.#hear(event, this.#listener.windows));
    events.addEventListener("resync", () => this.#listener.missed());
    events.addEventListener("error", () => {
      this.#listener.state("the exporter does not answer: trying again", false);
      // Refused rather than broken off: browsers give up for good, and do not tell why.
      if (events.readyState === EventSource.CLOSED) this.#explain();
    });
  }

  #close() {
    this.#events?.close();
    this.#events = null;
  }

  async #explain() {
    this.#close();
    try {
      const stop = new AbortController();
      const answer = await fetch(new URL("api/v1/events", HERE), { signal: stop.signal });
      if (!answer.ok) this.#listener.state((await answer.json()).error, false);
      stop.abort();
    } catch {
      // It is away: what is shown says so already.
    }
    setTimeout(() => document.hidden || this.#events !== null || this.#open(), RETRY_MS);
  }

  /** A connection may die without a word. */
  #watch() {
    if (this.#events !== null && !document.hidden && performance.now() - this.#heardAt > SILENCE_MS) {
      this.#listener.state("nothing heard for some seconds: trying again", false);
      this.#open();
    }
  }

  /**
   * @template Data
   * @param {MessageEvent<string>} event
   * @param {(data: Data) => void} tell
   */
  #hear(event, tell) {
    this.#heardAt = performance.now();
    tell(JSON.parse(event.data));
  }
}

/**
 * A GPU's windows of the last ten minutes.
 * @param {string} uuid
 * @returns {Promise<History>}
 */
export async function history(uuid) {
  const answer = await fetch(new URL(`api/v1/history?gpu=${encodeURIComponent(uuid)}&seconds=600`, HERE));
  if (!answer.ok) throw new Error(`history: ${answer.status}`);
  return answer.json();
}
