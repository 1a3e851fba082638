// What nvidia-smi says beside the share of SMs that had work. The library comes only once a chart is seen.

import { element } from "./dom.js";
import { View, Windows } from "./windows.js";

const HEIGHT = 84;

export class Chart {
  /** @type {Windows} */ #windows;
  /** @type {View} */ #view;
  /** @type {import("../vendor/uPlot.esm.js") | null} */ #plot = null;
  /** @type {HTMLElement} */ #plotNode;
  #isLoading = false;

  /**
   * @param {Windows} windows
   * @param {View} view
   */
  constructor(windows, view) {
    this.#windows = windows;
    this.#view = view;
    this.#plotNode = element("div", { class: "plot" });
    const names = element(
      "div",
      { class: "names", "aria-hidden": "true" },
      element("span", { class: "top" }, "100 %"),
      element("span", { class: "lie" }, "nvidia-smi"),
      element("span", { class: "truth" }, "SM active"),
      element("span", { class: "bottom" }, "0 %"),
    );
    this.node = element("div", { class: "chart" }, names, this.#plotNode);
  }

  async draw() {
    const width = this.#plotNode.clientWidth;
    if (width === 0 || this.#isLoading) return;
    if (this.#plot === null) {
      this.#isLoading = true;
      const { default: uPlot } = await import("../vendor/uPlot.esm.js");
      this.#plot = new uPlot(this.#options(width), this.#data(width), this.#plotNode);
      this.#isLoading = false;
      return;
    }
    if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT });
    this.#plot.setData(this.#data(width), false);
    this.#plot.setScale("x", { min: this.#view.from, max: this.#view.to });
  }

  /** Colours are of the moment: a change of theme makes the chart anew. */
  forget() {
    this.#plot?.destroy();
    this.#plot = null;
  }

  /**
   * @param {number} width
   * @returns {import("../vendor/uPlot.esm.js").Options}
   */
  #options(width) {
    const style = getComputedStyle(this.node);
    const [faint, line] = ["--faint", "--line"].map((name) => style.getPropertyValue(name));
    const grid = { stroke: line, width: 1 };
    return {
      width,
      height: HEIGHT,
      padding: [4, 0, 4, 0],
      cursor: { show: false },
      legend: { show: false },
      scales: { x: { time: false, auto: false }, y: { range: [0, 1.02] } },
      axes: [
        { stroke: faint, grid, size: 0, ticks: { show: false }, space: 90, values: () => [] },
        { stroke: faint, grid, size: 0, ticks: { show: false }, splits: [0, 0.5, 1], values: () => [] },
      ],
      series: [
        {},
        { label: "nvidia-smi", stroke: style.getPropertyValue("--lie"), width: 2, points: { show: false } },
        { label: "SM active", stroke: style.getPropertyValue("--truth"), fill: `${style.getPropertyValue("--truth")}33`, width: 2, points: { show: false } },
      ],
    };
  }

  /**
   * Means of as many windows as share a pixel; a gap where nothing was measured.
   * @param {number} width
   * @returns {[number[], (number | null)[], (number | null)[]]}
   */
  #data(width) {
    const { from, to, span } = this.#view;
    const step = Math.max(0.1, span / width);
    const [nvml, active] = [this.#windows.ratio.nvml_utilization, this.#windows.ratio.sm_active];
    /** @type {[number[], (number | null)[], (number | null)[]]} */
    const data = [[], [], []];
    let slot = -Infinity;
    let [count, nvmlSum, nvmlCount, activeSum, activeCount] = [0, 0, 0, 0, 0];
    const flush = () => {
      if (count === 0) return;
      data[0].push((slot + 0.5) * step);
      data[1].push(nvmlCount > 0 ? nvmlSum / nvmlCount : null);
      data[2].push(activeCount > 0 ? activeSum / activeCount : null);
      [count, nvmlSum, nvmlCount, activeSum, activeCount] = [0, 0, 0, 0, 0];
    };
    for (let i = this.#windows.firstAfter(from); i < this.#windows.length && this.#windows.end[i] <= to + 1; i += 1) {
      const own = Math.floor((this.#windows.end[i] - this.#windows.duration[i] / 2) / step);
      if (own < slot) continue;
      if (own !== slot) {
        flush();
        if (own - slot > Math.max(3, 3 / step)) {
          data[0].push((own - 0.5) * step);
          data[1].push(null);
          data[2].push(null);
        }
        slot = own;
      }
      count += 1;
      if (nvml[i] === nvml[i]) [nvmlSum, nvmlCount] = [nvmlSum + nvml[i], nvmlCount + 1];
      if (active[i] === active[i]) [activeSum, activeCount] = [activeSum + active[i], activeCount + 1];
    }
    flush();
    return data;
  }
}
