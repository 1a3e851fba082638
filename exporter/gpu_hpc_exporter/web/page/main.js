// The page: cards of GPUs, the stretch of time that all of them show, and what comes over the connection.

import { Card, setColour } from "./card.js";
import { byId, element, setRows, setText } from "./dom.js";
import { Connection, history } from "./live.js";
import { LONGEST, View } from "./windows.js";

const FEW = 4;
/** Windows come in handfuls, about once a second: shown so much later, time goes on evenly and nothing is missing. */
const BEHIND_S = 1.5;
const view = new View();
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
  void load(card);
  card.draw();
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
    card.draw();
    drawLater(card);
  } catch {
    // The connection's state tells; it is asked again once that is back.
  } finally {
    loading.delete(card);
  }
}

/** @param {import("./live.js").Gpus} told */
function take(told) {
  view.now = told.now_seconds - BEHIND_S;
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
  const lost = told.lost.length > 0 ? `Lost: ${told.lost.join(", ")}. ` : "";
  const text = !told.up
    ? `No GPU can be read: ${told.down_reason}. Run “gpu-hpc-exporter doctor” on this machine: it says what to do.`
    : told.recording !== null
      ? `Playing the recording ${told.recording}: not this machine's GPUs.`
      : lost || (told.gpus.length === 0 ? "The driver shows no GPU." : "");
  banner.hidden = text === "";
  banner.classList.toggle("down", !told.up || lost !== "");
  setText(banner, text);
}

/** @param {import("./live.js").NewWindows} told */
function takeWindows(told) {
  view.now = told.now_seconds - BEHIND_S;
  for (const [uuid, columns] of Object.entries(told.windows)) cards.get(uuid)?.windows.add(columns);
  draw();
}

/** What was heard is no longer all: ask anew for what is on the screen. */
function missed() {
  for (const card of cards.values()) {
    card.windows.forget();
    if (card.isVisible) void load(card);
  }
}

let isDue = false;
/** At most once a picture of the screen. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    for (const card of cards.values()) card.draw();
  });
}

function drawSlowly() {
  for (const card of cards.values()) if (card.isVisible) drawLater(card);
  showSpan();
}

/** @type {Set<Card>} */
const later = new Set();
/** One card a picture of the screen: many at once would be seen as a halt. @param {Card} card */
function drawLater(card) {
  if (later.size === 0) requestAnimationFrame(drawNext);
  later.add(card);
}

function drawNext() {
  const [card] = later;
  later.delete(card);
  card.drawSlowly();
  if (later.size > 0) requestAnimationFrame(drawNext);
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
