// Unit by time by intensity, one pixel column a stretch of time, and below it the class of each window.

import { element, percent } from "./dom.js";
import { CLASSES, LONGEST, UNITS, View, Windows } from "./windows.js";

const ROW = 20;
const GAP = 2;
const CLASS_ROW = 12;
const AXIS = 18;
const HEIGHT = UNITS.length * (ROW + GAP) + CLASS_ROW + AXIS;
const ROWS = UNITS.length + 1;
const WIDEST = 2000;
/** What falls into each pixel: the same arrays for all pictures, which leaves nothing to collect. */
const SUMS = new Float32Array(WIDEST * UNITS.length);
const WEIGHTS = new Float32Array(WIDEST * UNITS.length);
const CLASS_AT = new Int16Array(WIDEST);
const LONGEST_AT = new Float32Array(WIDEST);
const isDark = matchMedia("(prefers-color-scheme: dark)");

/** From nothing over busy to the limit: readable without telling red from green. @type {[number, number, number, number][]} */
const STOPS = [
  [0, 26, 28, 60],
  [0.25, 76, 40, 130],
  [0.5, 178, 54, 121],
  [0.75, 247, 112, 69],
  [0.9, 252, 185, 60],
  [1, 252, 253, 164],
];
const COLOURS = gradient();

function gradient() {
  const made = new Uint32Array(256);
  for (let i = 0; i < 256; i += 1) {
    const value = i / 255;
    const upper = STOPS.findIndex(([at]) => at >= value) || 1;
    const [low, high] = [STOPS[upper - 1], STOPS[upper]];
    const part = (value - low[0]) / (high[0] - low[0]);
    const [red, green, blue] = [1, 2, 3].map((c) => Math.round(low[c] + part * (high[c] - low[c])));
    made[i] = rgba(red, green, blue);
  }
  return made;
}

/**
 * @param {number} red
 * @param {number} green
 * @param {number} blue
 */
function rgba(red, green, blue) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

const CLASS_COLOURS = CLASSES.map(([, colour]) => {
  const number = parseInt(colour.slice(1), 16);
  return rgba(number >> 16, (number >> 8) & 255, number & 255);
});

export class Heatmap {
  /** @type {Windows} */ #windows;
  /** @type {View} */ #view;
  #canvas = element("canvas", { tabindex: "0", role: "img" });
  #tip = element("div", { class: "tip", role: "status", hidden: "" });
  #pixels = document.createElement("canvas");
  /** @type {number | null} */ #cursor = null;
  /** @type {number | null} */ #dragFrom = null;
  /** Of what the picture is. */
  #drawn = "";

  /**
   * @param {Windows} windows
   * @param {View} view
   * @param {string} label
   */
  constructor(windows, view, label) {
    this.#windows = windows;
    this.#view = view;
    const names = UNITS.map((unit) => element("span", {}, NAMES[unit]));
    this.#canvas.setAttribute("aria-label", `${label}: intensity of each unit over time. Arrow keys move, plus and minus zoom.`);
    const labels = element("div", { class: "units", "aria-hidden": "true" }, ...names, element("span", { class: "faint" }, "class"));
    this.node = element("div", { class: "heatmap" }, labels, element("div", { class: "plot" }, this.#canvas, this.#tip));
    this.#listen();
  }

  /** Nothing where the picture would be the same. */
  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.#canvas.clientWidth;
    if (width === 0) return;
    const [wide, high] = [Math.round(width * ratio), Math.round(HEIGHT * ratio)];
    const columns = Math.max(1, Math.min(wide, WIDEST));
    const [from, to] = this.#view.pixels(columns);
    const state = [from, to, columns, ratio, this.#windows.revision, this.#cursor, this.#dragFrom, isDark.matches].join();
    if (state === this.#drawn) return;
    this.#drawn = state;
    if (this.#canvas.width !== wide || this.#canvas.height !== high) {
      this.#canvas.width = wide;
      this.#canvas.height = high;
    }
    const context = this.#canvas.getContext("2d");
    if (context === null) return;
    this.#paint(columns, from, to);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.imageSmoothingEnabled = false;
    const style = getComputedStyle(this.#canvas);
    context.fillStyle = style.getPropertyValue("--absent");
    context.fillRect(0, 0, width, HEIGHT);
    for (let row = 0; row < ROWS; row += 1) {
      const tall = row < UNITS.length ? ROW : CLASS_ROW;
      context.drawImage(this.#pixels, 0, row, this.#pixels.width, 1, 0, row * (ROW + GAP), width, tall);
    }
    context.fillStyle = style.getPropertyValue("--card");
    for (let row = 1; row < ROWS; row += 1) context.fillRect(0, row * (ROW + GAP) - GAP, width, GAP);
    this.#drawAxis(context, width, style);
    this.#drawCursor(context, width, style);
  }

  /**
   * One pixel row a unit and one for classes, means over what falls into a pixel.
   * @param {number} wide
   * @param {number} from
   * @param {number} to
   */
  #paint(wide, from, to) {
    if (this.#pixels.width !== wide || this.#pixels.height !== ROWS) {
      this.#pixels.width = wide;
      this.#pixels.height = ROWS;
    }
    const context = this.#pixels.getContext("2d", { willReadFrequently: true });
    if (context === null) return;
    const scale = wide / (to - from);
    const sums = SUMS.subarray(0, wide * UNITS.length).fill(0);
    const weights = WEIGHTS.subarray(0, wide * UNITS.length).fill(0);
    const classes = CLASS_AT.subarray(0, wide).fill(-1);
    const longest = LONGEST_AT.subarray(0, wide).fill(0);
    const columns = UNITS.map((unit) => this.#windows.ratio[unit]);
    for (let i = this.#windows.firstAfter(from); i < this.#windows.length; i += 1) {
      const right = (this.#windows.end[i] - from) * scale;
      const left = right - this.#windows.duration[i] * scale;
      const last = Math.min(wide - 1, Math.ceil(right) - 1);
      for (let x = Math.max(0, Math.floor(left)); x <= last; x += 1) {
        const part = Math.min(right, x + 1) - Math.max(left, x);
        if (part > longest[x]) {
          longest[x] = part;
          classes[x] = this.#windows.bottleneck[i];
        }
        for (let unit = 0; unit < columns.length; unit += 1) {
          const value = columns[unit][i];
          if (value === value) {
            sums[unit * wide + x] += value * part;
            weights[unit * wide + x] += part;
          }
        }
      }
    }
    const image = context.createImageData(wide, ROWS);
    const out = new Uint32Array(image.data.buffer);
    for (let i = 0; i < sums.length; i += 1) {
      if (weights[i] > 0) out[i] = COLOURS[Math.min(255, Math.round((255 * sums[i]) / weights[i]))];
    }
    for (let x = 0; x < wide; x += 1) if (classes[x] >= 0) out[UNITS.length * wide + x] = CLASS_COLOURS[classes[x]];
    context.putImageData(image, 0, 0);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} width
   * @param {CSSStyleDeclaration} style
   */
  #drawAxis(context, width, style) {
    context.fillStyle = style.getPropertyValue("--card");
    context.fillRect(0, HEIGHT - AXIS, width, AXIS);
    context.fillStyle = style.getPropertyValue("--faint");
    context.font = `11px ${style.fontFamily}`;
    context.textBaseline = "bottom";
    const count = Math.max(2, Math.min(7, Math.floor(width / 110)));
    for (let tick = 0; tick < count; tick += 1) {
      const part = tick / (count - 1);
      context.textAlign = tick === 0 ? "left" : tick === count - 1 ? "right" : "center";
      context.fillText(this.#view.clock(this.#view.from + part * this.#view.span), part * width, HEIGHT - 1);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} width
   * @param {CSSStyleDeclaration} style
   */
  #drawCursor(context, width, style) {
    if (this.#cursor === null) return;
    const place = (/** @type {number} */ time) => ((time - this.#view.from) / this.#view.span) * width;
    context.fillStyle = style.getPropertyValue("--cursor");
    context.fillRect(Math.round(place(this.#cursor)) - 1, 0, 2, HEIGHT - AXIS);
    if (this.#dragFrom !== null) {
      const [left, right] = [place(this.#dragFrom), place(this.#cursor)].sort((a, b) => a - b);
      context.globalAlpha = 0.3;
      context.fillRect(left, 0, right - left, HEIGHT - AXIS);
      context.globalAlpha = 1;
    }
  }

  #listen() {
    const canvas = this.#canvas;
    canvas.addEventListener("pointermove", (event) => this.#point(this.#timeAt(event)));
    canvas.addEventListener("pointerleave", () => {
      if (this.#dragFrom === null && document.activeElement !== canvas) this.#point(null);
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse") return this.#point(this.#timeAt(event));
      canvas.setPointerCapture(event.pointerId);
      this.#dragFrom = this.#timeAt(event);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [from, to] = [this.#dragFrom, this.#timeAt(event)];
      this.#dragFrom = null;
      if (from === null) return;
      if (Math.abs(to - from) * canvas.clientWidth > 5 * this.#view.span) this.#view.show(Math.abs(to - from), Math.max(from, to));
    });
    canvas.addEventListener("dblclick", () => this.#view.show(LONGEST, null));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => {
      if (this.#press(event.key)) event.preventDefault();
    });
  }

  /** Whether the key means something here. @param {string} key */
  #press(key) {
    const view = this.#view;
    const step = Math.max(0.1, view.span / 100);
    const at = this.#cursor ?? view.to - view.span / 2;
    switch (key) {
      case "ArrowLeft":
      case "ArrowRight":
        this.#move(at + (key === "ArrowLeft" ? -step : step));
        return true;
      case "+":
      case "=":
        view.zoom(0.5, at);
        break;
      case "-":
        view.zoom(2, at);
        break;
      case "Enter":
        view.show(1, at + 0.5);
        break;
      case "Home":
        this.#move(view.now - LONGEST);
        return true;
      case "End":
        view.show(view.span, null);
        this.#move(view.now);
        return true;
      case "Escape":
        view.show(LONGEST, null);
        this.#point(null);
        return true;
      default:
        return false;
    }
    this.#point(at);
    return true;
  }

  /** The cursor, and with it what is shown where it would leave it. @param {number} time */
  #move(time) {
    const view = this.#view;
    const within = Math.min(view.now, Math.max(view.now - LONGEST, time));
    if (within < view.from) view.show(view.span, within + view.span);
    else if (within > view.to) view.show(view.span, within);
    this.#point(within);
  }

  /** @param {PointerEvent | MouseEvent} event */
  #timeAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    return this.#view.from + (this.#view.span * (event.clientX - box.left)) / box.width;
  }

  /** @param {number | null} time */
  #point(time) {
    this.#cursor = time;
    this.#tip.hidden = time === null;
    if (time !== null) {
      const place = (time - this.#view.from) / this.#view.span;
      this.#tip.classList.toggle("left", place > 0.5);
      this.#tip.style.insetInlineStart = place > 0.5 ? "auto" : `${100 * place}%`;
      this.#tip.style.insetInlineEnd = place > 0.5 ? `${100 * (1 - place)}%` : "auto";
      this.#tip.textContent = this.#describe(time);
    }
    this.draw();
  }

  /** @param {number} time */
  #describe(time) {
    const i = this.#windows.at(time);
    const clock = this.#view.clock(time);
    if (i < 0) return `${clock}\nnot measured`;
    const value = (/** @type {import("./windows.js").Column} */ name) => {
      const ratio = this.#windows.ratio[name][i];
      return percent(Number.isNaN(ratio) ? null : ratio);
    };
    const lines = UNITS.map((unit) => `${NAMES[unit]} ${value(unit)}`);
    const name = CLASSES[this.#windows.bottleneck[i]][0].replace("_", " ");
    return [clock, name, ...lines, `SM active ${value("sm_active")}`, `nvidia-smi ${value("nvml_utilization")}`].join("\n");
  }
}

export const NAMES = { sm: "SM", l2: "L2 to DRAM", dram: "DRAM", pcie: "PCIe", nvlink: "NVLink" };
