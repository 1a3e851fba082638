// Elements made from data. Text from outside only ever becomes text.

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/**
 * The page's own element with this id.
 * @param {string} id
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found;
}

/**
 * Sets text where it differs: what does not change costs nothing and keeps a selection.
 * @param {Node} node
 * @param {string} text
 */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Sets text in which what stands between backticks is code.
 * @param {HTMLElement} node
 * @param {string} text
 */
export function setProse(node, text) {
  if (node.textContent === text.replaceAll("`", "")) return;
  node.replaceChildren(...text.split("`").map((part, i) => (i % 2 === 1 ? element("code", {}, part) : part)));
}

/**
 * Rows of a table, in place; what is the same stays, and with it a tooltip that is open.
 * @param {HTMLElement} body
 * @param {(string | Node)[][]} rows
 */
export function setRows(body, rows) {
  while (body.children.length > rows.length) body.lastElementChild?.remove();
  rows.forEach((cells, number) => {
    let row = body.children[number];
    if (row === undefined) {
      row = element("tr");
      body.append(row);
    }
    while (row.children.length < cells.length) row.append(element("td"));
    cells.forEach((cell, place) => {
      const slot = row.children[place];
      if (typeof cell === "string") setText(slot, cell);
      else if (!slot.firstChild?.isEqualNode(cell)) slot.replaceChildren(cell);
    });
  });
}

/** @param {number | null} value */
export function percent(value) {
  return value === null ? "–" : `${Math.round(100 * value)} %`;
}

/**
 * A number with a unit and a prefix, three digits.
 * @param {number | null} value
 * @param {string} unit
 * @param {number} [step]
 */
export function quantity(value, unit, step = 1000) {
  if (value === null) return "–";
  const prefixes = step === 1024 ? ["", "Ki", "Mi", "Gi", "Ti"] : ["", "k", "M", "G", "T"];
  let power = 0;
  while (Math.abs(value) >= step && power < prefixes.length - 1) {
    value /= step;
    power += 1;
  }
  return `${short(value)} ${prefixes[power]}${unit}`;
}

/** @param {number | null} seconds */
export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1e-3) return `${short(seconds * 1e6)} µs`;
  if (seconds < 1) return `${short(seconds * 1e3)} ms`;
  return seconds < 120 ? `${short(seconds)} s` : `${short(seconds / 60)} min`;
}

/** @param {number} value */
function short(value) {
  return value >= 100 || value === 0 ? value.toFixed(0) : value.toPrecision(value >= 10 ? 3 : 2);
}
