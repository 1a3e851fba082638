// All there is to see of one GPU. Made once, then kept up to date while it is on the screen.

import { Chart } from "./chart.js";
import { duration, element, percent, quantity, setProse, setRows, setText } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { CLASSES, View, Windows } from "./windows.js";

/** @typedef {import("./live.js").Gpu} Gpu */

/** @type {Record<string, string>} */
const PATTERNS = {
  many_short: "many and short: launch-bound",
  few_long: "few and long: look inside it with ncu",
  jittery: "takes ever different times",
  contended: "slower while other jobs run",
};
const SIZES = ["256 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB", "more"];
const NO_LATENCY = "Not known: no launch of it was traced lately, as where a CUDA graph launches it, or CUPTI is older than 12.5";
const DIRECTIONS = { h2d: "host → GPU", d2h: "GPU → host", d2d: "within the GPU", p2p: "GPU → GPU" };

export class Card {
  /** @type {View} */ #view;
  /** @type {Gpu | null} */ #gpu = null;
  #title = element("span");
  #model = element("small");
  #facts = element("p", { class: "facts faint" });
  #sentence = element("p", { class: "sentence" });
  #advice = element("p", { class: "advice" });
  #also = element("ul", { class: "also" });
  #nvml = element("strong");
  #active = element("strong");
  #used = element("strong");
  #bar = element("div", { class: "bar", role: "img" });
  #legend = element("ul", { class: "legend" });
  #jobs = element("tbody");
  #kernels = element("tbody");
  #copies = element("tbody");
  #processes = element("p", { class: "faint" });
  #sources = element("tbody");
  #noKernels = element("p", { class: "faint" }, "No kernel agent tells of this GPU: start programs with ");
  isVisible = false;

  /**
   * @param {Gpu} gpu
   * @param {View} view
   * @param {boolean} isOpen
   */
  constructor(gpu, view, isOpen) {
    this.#view = view;
    this.windows = new Windows();
    const label = `GPU ${gpu.gpu}${gpu.profile ? ` ${gpu.profile}` : ""}`;
    this.heatmap = new Heatmap(this.windows, view, label);
    this.chart = new Chart(this.windows, view);
    this.#noKernels.append(element("code", {}, "gpu-hpc-exporter run -- COMMAND"), ".");
    this.#kernelTable = table(["Kernel, last minute", "Job", "Kind", "Share", "Mean", "Runs/s", "Launch to start", "Pattern"], this.#kernels, "kernels");
    this.#copyTable = table(["Copies, last minute", "Job", "Memory", "Bytes/s", "Copies/s", "Seen in the last minute, by size up to"], this.#copies);
    this.#jobTable = table(["Job", "Kind", "User", "Known by", "Processes", "Memory"], this.#jobs);
    this.details = element(
      "details",
      {},
      element("summary", {}, "Jobs, kernels, copies, sources"),
      this.#jobTable,
      this.#processes,
      this.#kernelTable,
      this.#copyTable,
      this.#noKernels,
      table(["Source", "State", "Why"], this.#sources, "states"),
    );
    this.details.open = isOpen;
    this.details.addEventListener("toggle", () => this.#updateDetails());
    this.node = element(
      "article",
      { class: "card", id: `gpu-${gpu.uuid}`, "aria-label": label },
      element("header", {}, element("h2", {}, this.#title, " ", this.#model), this.#facts),
      element("div", { class: "verdict" }, this.#sentence, this.#advice, this.#also),
      element(
        "dl",
        { class: "numbers" },
        number("nvidia-smi says", this.#nvml, "lie"),
        number("SMs with work", this.#active, "truth"),
        number("busiest pipe", this.#used, ""),
      ),
      element("div", { class: "times" }, this.heatmap.node, this.chart.node),
      element("div", {}, this.#bar, this.#legend),
      this.details,
    );
    setText(this.#title, label);
    this.update(gpu);
  }

  /** @type {HTMLElement} */ #kernelTable;
  /** @type {HTMLElement} */ #copyTable;
  /** @type {HTMLElement} */ #jobTable;

  /** @param {Gpu} gpu */
  update(gpu) {
    this.#gpu = gpu;
    setText(this.#model, gpu.name);
    if (this.#model.title !== gpu.uuid) this.#model.title = gpu.uuid;
    setText(this.#sentence, gpu.verdict.sentence);
    if (this.node.dataset.cause !== gpu.verdict.cause) this.node.dataset.cause = gpu.verdict.cause;
    setColour(this.node, gpu);
    if (!this.isVisible) return;
    setProse(this.#advice, gpu.verdict.advice);
    this.#updateAlso(gpu.verdict.also);
    setText(this.#facts, facts(gpu));
    setText(this.#nvml, percent(gpu.nvml_utilization_ratio));
    setText(this.#active, percent(gpu.sm_active_ratio));
    setText(this.#used, percent(gpu.sm_utilization_ratio));
    this.#updateDetails();
  }

  /** Everything that depends on the stretch of time shown. */
  draw() {
    if (!this.isVisible) return;
    this.heatmap.draw();
  }

  /** What need not be five times a second. */
  drawSlowly() {
    if (!this.isVisible) return;
    void this.chart.draw();
    this.#drawBar();
  }

  #drawBar() {
    const shares = this.windows.isLoaded ? this.windows.shares(this.#view.from, this.#view.to) : null;
    const known = CLASSES.map(([name, colour], i) => ({ name, colour, share: shares?.[i] ?? 0 })).filter((c) => c.share >= 0.001);
    const text = known.map(({ name, share }) => `${name.replace("_", " ")} ${percent(share)}`);
    this.#bar.setAttribute("aria-label", `Where the time went: ${text.join(", ") || "not measured"}`);
    while (this.#bar.children.length > known.length) this.#bar.lastElementChild?.remove();
    while (this.#bar.children.length < known.length) this.#bar.append(element("span"));
    while (this.#legend.children.length > known.length) this.#legend.lastElementChild?.remove();
    while (this.#legend.children.length < known.length) this.#legend.append(element("li", {}, element("i"), element("span")));
    known.forEach(({ colour, share }, i) => {
      const part = /** @type {HTMLElement} */ (this.#bar.children[i]);
      part.style.flexGrow = String(share);
      part.style.backgroundColor = colour;
      const item = /** @type {HTMLElement} */ (this.#legend.children[i]);
      /** @type {HTMLElement} */ (item.children[0]).style.backgroundColor = colour;
      setText(item.children[1], text[i]);
    });
  }

  /** What else is wrong, with its advice. @param {import("./live.js").Verdict[]} found */
  #updateAlso(found) {
    while (this.#also.children.length > found.length) this.#also.lastElementChild?.remove();
    while (this.#also.children.length < found.length) this.#also.append(element("li", {}, element("strong"), " ", element("span")));
    found.forEach(({ sentence, advice }, i) => {
      const [what, todo] = /** @type {HTMLElement[]} */ ([...this.#also.children[i].children]);
      setText(what, `${sentence}.`);
      setProse(todo, advice);
    });
  }

  #updateDetails() {
    const gpu = this.#gpu;
    if (gpu === null || !this.details.open || !this.isVisible) return;
    setRows(
      this.#jobs,
      gpu.jobs.map((job) => [
        job.job + (job.rank && ` rank ${job.rank}`),
        job.kind,
        job.user,
        [job.namespace, job.pod, job.container].filter(Boolean).join(" / ") || job.job_id || job.source,
        String(job.processes),
        quantity(job.memory_bytes, "B", 1024),
      ]),
    );
    this.#jobTable.hidden = gpu.jobs.length === 0;
    const processes = gpu.processes?.map((p) => `${p.pid} (${quantity(p.memory_bytes, "B", 1024)})`) ?? [];
    const more = (gpu.process_count ?? 0) - processes.length;
    setText(
      this.#processes,
      gpu.processes === null ? "Its processes cannot be listed." : `PIDs: ${processes.join(", ") || "none"}${more > 0 ? ` and ${more} more` : ""}.`,
    );
    this.#updateKernels(gpu);
    setRows(
      this.#sources,
      gpu.sources.map((source) => [source.source, source.state.replace("_", " "), source.reason]),
    );
  }

  /** @param {Gpu} gpu */
  #updateKernels(gpu) {
    this.#noKernels.hidden = gpu.kernels.length + gpu.copies.length > 0;
    this.#kernelTable.hidden = gpu.kernels.length === 0;
    this.#copyTable.hidden = gpu.copies.length === 0;
    const isShared = gpu.job_count > 1 || new Set([...gpu.kernels, ...gpu.copies].map((row) => row.job)).size > 1;
    for (const shown of [this.#kernelTable, this.#copyTable]) shown.classList.toggle("one-job", !isShared);
    setRows(
      this.#kernels,
      gpu.kernels.map((kernel) => [
        kernel.kernel,
        kernel.job,
        kernel.category,
        percent(kernel.share_ratio),
        duration(kernel.mean_seconds),
        quantity(kernel.executions_per_second, ""),
        latency(kernel.launch_latency_history_seconds, kernel.launch_latency_seconds),
        kernel.pattern === null ? "" : (PATTERNS[kernel.pattern] ?? kernel.pattern),
      ]),
    );
    setRows(
      this.#copies,
      gpu.copies.map((copy) => [
        DIRECTIONS[/** @type {keyof typeof DIRECTIONS} */ (copy.direction)] ?? copy.direction,
        copy.job,
        copy.memory,
        quantity(copy.bytes_per_second, "B/s"),
        quantity(copy.copies_per_second, ""),
        copy.sizes.flatMap((count, i) => (count > 0 ? [`${SIZES[i]}: ${quantity(count, "")}`] : [])).join(", "),
      ]),
    );
  }
}

/**
 * The colour of what it mostly does; a style that is set anew costs a layout even where it is the same.
 * @param {HTMLElement} node
 * @param {Gpu} gpu
 */
export function setColour(node, gpu) {
  const colour = colourOf(mainClass(gpu));
  if (node.style.getPropertyValue("--class") !== colour) node.style.setProperty("--class", colour);
}

/** @param {Gpu} gpu */
function mainClass(gpu) {
  const shares = Object.entries(gpu.bottleneck_ratio);
  return shares.length === 0 ? "unknown" : shares.reduce((most, one) => (one[1] > most[1] ? one : most))[0];
}

/** @param {string} name */
function colourOf(name) {
  return CLASSES.find(([known]) => known === name)?.[1] ?? "#565c66";
}

/** @param {Gpu} gpu */
function facts(gpu) {
  const memory = gpu.memory_used_bytes === null ? "" : `${quantity(gpu.memory_used_bytes, "B", 1024)} of ${quantity(gpu.memory_total_bytes, "B", 1024)}`;
  const power = gpu.power_watts === null ? "" : `${Math.round(gpu.power_watts)} W${gpu.power_limit_watts === null ? "" : ` of ${Math.round(gpu.power_limit_watts)} W`}`;
  const heat = gpu.temperature_celsius === null ? "" : `${Math.round(gpu.temperature_celsius)} °C`;
  const clock = gpu.clock_sm_hertz === null ? "" : `${Math.round(gpu.clock_sm_hertz / 1e6)} MHz`;
  const jobs = gpu.jobs.length === 1 ? gpu.jobs[0].job : gpu.job_count > 1 ? `${gpu.job_count} jobs` : "no job";
  return [jobs, memory, power, heat, clock].filter(Boolean).join("  ·  ");
}

/**
 * @param {string} name
 * @param {HTMLElement} value
 * @param {string} kind
 */
function number(name, value, kind) {
  return element("div", { class: kind }, element("dt", {}, name), element("dd", {}, value));
}

/**
 * @param {string[]} heads
 * @param {HTMLElement} body
 * @param {string} [kind]
 */
function table(heads, body, kind = "") {
  const row = element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)));
  return element("div", { class: `wide ${kind}` }, element("table", {}, element("thead", {}, row), body));
}

/**
 * The last ten minutes of a latency, and what it is now; on a dash one can ask why.
 * @param {(number | null)[]} values
 * @param {number | null} now
 */
function latency(values, now) {
  const made = element("span", { class: "latency" }, sparkline(values), duration(now));
  if (now === null) made.title = NO_LATENCY;
  return made;
}

/** @param {(number | null)[]} values */
function sparkline(values) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const known = values.filter((value) => value !== null);
  const most = Math.max(1e-9, ...known);
  const step = 60 / Math.max(1, values.length - 1);
  const points = values.flatMap((value, i) => (value === null ? [] : [`${(i * step).toFixed(1)},${(15 - (14 * value) / most).toFixed(1)}`]));
  const line = document.createElementNS(made.namespaceURI, "polyline");
  line.setAttribute("points", points.join(" "));
  for (const [name, value] of [["viewBox", "0 0 60 16"], ["class", "spark"], ["role", "img"], ["aria-label", `at most ${duration(known.length ? most : null)}`]]) {
    made.setAttribute(name, value);
  }
  made.append(line);
  return made;
}
