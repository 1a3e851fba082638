// The page: cards of GPUs, the stretch of time that all of them show, and what comes over the connection.

import { Card, setColour } from "./card.js";
import { byId, element, setProse, setRows, setText } from "./dom.js";
import { Connection, history } from "./live.js";
import { Delay, LONGEST, View } from "./windows.js";

const FEW = 4;
const view = new View();
const delay = new Delay();
/** @type {Map<string, Card>} */
const cards = new Map();
/** @type {Map<string, HTMLAnchorElement>} */
const tiles = new Map();

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const card = [...cards.values()].find(({ node }) => node === entry.target);
      if (card === undefined) continue;
      card.isVisible = entry.isIntersecting;
      if (card.isVisible) show(card);
    }
  },
  { rootMargin: "200px" },
);

/** @type {Map<string, import("./live.js").Gpu>} */
let newest = new Map();

/** @param {Card} card */
function show(card) {
  const gpu = newest.get(uuidOf(card));
  if (gpu !== undefined) card.update(gpu);
  drawSoon(card);
  drawLater(card);
}

/** @param {Card} card */
function uuidOf(card) {
  return card.node.id.slice("gpu-".length);
}

/** @type {Set<Card>} */
const loading = new Set();

/** Ask for what this page has not heard of itself. @param {Card} card */
async function load(card) {
  if (card.windows.isLoaded || loading.has(card)) return;
  loading.add(card);
  try {
    card.windows.load((await history(uuidOf(card))).windows);
    drawSoon(card);
    drawLater(card);
  } catch {
    // The connection's state tells; it is asked again once that is back.
  } finally {
    loading.delete(card);
  }
}

/** @param {import("./live.js").Gpus} told */
function take(told) {
  view.now = told.now_seconds - delay.seconds;
  view.unixOffset = told.unix_seconds - told.now_seconds;
  newest = new Map(told.gpus.map((gpu) => [gpu.uuid, gpu]));
  showBanner(told);
  for (const [uuid, card] of cards) {
    if (newest.has(uuid)) continue;
    seen.unobserve(card.node);
    card.chart.forget();
    card.node.remove();
    cards.delete(uuid);
    tiles.get(uuid)?.remove();
    tiles.delete(uuid);
  }
  for (const gpu of told.gpus) {
    const card = cards.get(gpu.uuid);
    if (card === undefined) addCard(gpu, told.gpus.length <= FEW);
    else card.update(gpu);
    const tile = tiles.get(gpu.uuid);
    if (tile !== undefined) {
      setColour(tile, gpu);
      if (tile.title !== gpu.verdict.sentence) tile.title = gpu.verdict.sentence;
    }
  }
  document.body.classList.toggle("many", told.gpus.length > FEW);
  byId("overview").hidden = told.gpus.length < 2;
  byId("tools").hidden = told.gpus.length === 0;
  byId("host").hidden = told.sources.length === 0;
  setRows(byId("sources"), told.sources.map((source) => [source.source, source.state.replace("_", " "), source.reason]));
  drawSlowly();
}

/**
 * @param {import("./live.js").Gpu} gpu
 * @param {boolean} isOpen
 */
function addCard(gpu, isOpen) {
  const card = new Card(gpu, view, isOpen);
  cards.set(gpu.uuid, card);
  byId("gpus").append(card.node);
  seen.observe(card.node);
  const tile = element("a", { href: `#${card.node.id}`, class: "tile" }, gpu.gpu);
  tiles.set(gpu.uuid, tile);
  byId("overview").append(tile);
}

/** @param {import("./live.js").Gpus} told */
function showBanner(told) {
  const banner = byId("banner");
  const [what, advice] = notice(told);
  banner.hidden = what === "";
  banner.classList.toggle("down", told.recording === null && told.down_reason !== "starting");
  setText(banner.children[0], what);
  setProse(/** @type {HTMLElement} */ (banner.children[1]), advice);
}

const DOCTOR = "Run `gpu-hpc-exporter doctor` on this machine: it looks at everything from the PCI bus up and says what to do.";
const REPLAY = "No GPU here? `gpu-hpc-exporter --source=replay` plays a recording of an H200 on any machine.";

/**
 * What everybody should know first, and what to do about it.
 * @param {import("./live.js").Gpus} told
 * @returns {[string, string]}
 */
function notice(told) {
  const count = told.gpus.filter((gpu) => gpu.parent_uuid === "").length;
  if (!told.up) {
    const replay = told.down_reason === "library_not_found" ? ` ${REPLAY}` : "";
    return [`No GPU can be read (${told.down_reason}):`, `${told.down_advice}. ${DOCTOR}${replay}`];
  }
  if (told.recording !== null) return [`Playing the recording ${told.recording}:`, "not this machine's GPUs."];
  if (told.lost.length > 0) return [`Lost: ${told.lost.join(", ")}.`, DOCTOR];
  if (count < told.expected_gpus) return [`${count} of ${told.expected_gpus} GPUs can be read.`, DOCTOR];
  return told.gpus.length === 0 ? ["The driver is up and shows no GPU.", `${DOCTOR} ${REPLAY}`] : ["", ""];
}

/** @param {import("./live.js").NewWindows} told */
function takeWindows(told) {
  for (const [uuid, columns] of Object.entries(told.windows)) cards.get(uuid)?.windows.add(columns);
  delay.note([...cards.values()].map(({ windows }) => told.now_seconds - windows.newest));
  view.now = told.now_seconds - delay.seconds;
  draw();
}

/** What was heard is no longer all: ask anew for what is on the screen. */
function missed() {
  for (const card of cards.values()) {
    card.windows.forget();
    if (card.isVisible) void load(card);
  }
}

function draw() {
  for (const card of cards.values()) if (card.isVisible) drawSoon(card);
}

function drawSlowly() {
  for (const card of cards.values()) if (card.isVisible) drawLater(card);
  showSpan();
}

/** Part of a picture's 16 ms: what is not drawn in it is drawn in the next. */
const BUDGET_MS = 5;
/** While somebody scrolls, only so often is a card asked for and completed that has come into sight. */
const SCROLLING_MS = 100;
/** Cards whose heatmap is due, and those whose chart, bar and history are. @type {Set<Card>} */
const soon = new Set();
/** @type {Set<Card>} */
const later = new Set();
let isAsked = false;
let scrolledAt = -Infinity;
let completedAt = -Infinity;
addEventListener("scroll", () => (scrolledAt = performance.now()), { passive: true });

/** @param {Card} card */
function drawSoon(card) {
  soon.add(card);
  ask();
}

/** @param {Card} card */
function drawLater(card) {
  later.add(card);
  ask();
}

function ask() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(drawDue);
}

/** Heatmaps first, then one of the others: all at once would be seen as a halt. */
function drawDue() {
  isAsked = false;
  const begin = performance.now();
  for (const card of soon) {
    if (performance.now() - begin > BUDGET_MS) break;
    soon.delete(card);
    card.draw();
  }
  const isScrolling = begin - scrolledAt < SCROLLING_MS;
  if (soon.size === 0 && !(isScrolling && begin - completedAt < SCROLLING_MS)) complete(begin);
  if (soon.size + later.size > 0) ask();
}

/** @param {number} now */
function complete(now) {
  for (const card of later) {
    later.delete(card);
    if (!card.isVisible) continue;
    completedAt = now;
    void load(card);
    card.drawSlowly();
    return;
  }
}

/** @type {HTMLButtonElement[]} */
const spans = [...document.querySelectorAll("button[data-span]")].map((button) => /** @type {HTMLButtonElement} */ (button));

function showSpan() {
  for (const button of spans) button.setAttribute("aria-pressed", String(Number(button.dataset.span) === view.span));
  byId("live").setAttribute("aria-pressed", String(view.end === null));
  setText(byId("shown"), view.end === null ? "" : `${view.clock(view.from)} to ${view.clock(view.to)}`);
}

view.changed = () => {
  draw();
  drawSlowly();
};
for (const button of spans) button.addEventListener("click", () => view.show(Number(button.dataset.span), view.end));
byId("live").addEventListener("click", () => view.show(view.span, null));
addEventListener("resize", () => view.changed());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const card of cards.values()) card.chart.forget();
  view.changed();
});
view.show(LONGEST, null);

new Connection({
  gpus: take,
  windows: takeWindows,
  missed,
  state: (text, isLive) => {
    setText(byId("connection"), text);
    byId("connection").classList.toggle("away", !isLive);
  },
});
