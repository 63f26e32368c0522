"use strict";
// The report's curves, sorted tables and zoomed pictures. Whatever comes from the data goes in as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);

function curveText(curve, place) {
  const show = (value, digits = 4) => (Math.abs(value) < 1000 ? value.toPrecision(digits) : value.toFixed(0));
  const value = curve.values[place];
  if (value === null) return "";
  const low = curve.low && curve.low[place], high = curve.high && curve.high[place];
  const span = low === undefined || low === null || low === high ? "" : ` (${show(low, 3)} to ${show(high, 3)})`;
  return `${curve.name} ${show(value)}${span}`;
}

function linearTicks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low), ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const part of decades < 1.5 ? [1, 2, 3, 5] : decades < 4 ? [1, 3] : [1]) {
      const tick = Number((part * 10 ** power).toPrecision(6));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  return ticks;
}

class Chart {
  constructor(figure) {
    this.chart = data.charts[Number(figure.dataset.chart)];
    this.svg = figure.querySelector("svg");
    this.output = figure.querySelector("output");
    this.log = figure.querySelector("#log");
    this.place = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    if (this.log) this.log.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.read(null);
  }

  add(tag, attributes, text) {
    const node = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    this.svg.appendChild(node);
    return node;
  }

  // Returns whether a value has a place on the axis: a logarithm has none for what is not above 0.
  drawn(value) {
    return value !== null && value !== undefined && (!this.logarithmic || value > 0);
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width || !height) return;
    this.logarithmic = Boolean(this.log && this.log.checked);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const values = this.chart.curves.flatMap((curve) => [...curve.values, ...(curve.low || []), ...(curve.high || [])]);
    const shown = values.filter((value) => this.drawn(value));
    if (!shown.length) {
      this.add("text", { x: 10, y: 20 }, "no value above 0");
      return;
    }
    let low = shown.reduce((a, b) => Math.min(a, b)), high = shown.reduce((a, b) => Math.max(a, b));
    if (this.chart.zero) low = Math.min(0, low);
    if (low === high) [low, high] = this.logarithmic ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    const first = this.chart.epochs[0], last = this.chart.epochs[this.chart.epochs.length - 1];
    const scale = this.logarithmic ? Math.log : (value) => value;
    const left = 52, right = width - 12, top = 10, foot = height - 24;
    this.x = (epoch) => (last === first ? (left + right) / 2 : left + ((epoch - first) / (last - first)) * (right - left));
    this.y = (value) => foot - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (foot - top);
    this.axes(low, high, first, last, left, right, foot);
    this.chart.curves.forEach((curve, number) => this.curve(curve, number % 3));
    this.cursor = this.add("line", { class: "cursor", y1: top, y2: foot, visibility: "hidden" });
    this.read(this.place);
  }

  axes(low, high, first, last, left, right, foot) {
    for (const tick of this.logarithmic ? logTicks(low, high) : linearTicks(low, high)) {
      this.add("line", { class: "grid", x1: left, x2: right, y1: this.y(tick), y2: this.y(tick) });
      this.add("text", { x: left - 7, y: this.y(tick) + 4, "text-anchor": "end" }, String(tick));
    }
    const epochs = last === first ? [first] : linearTicks(first, last).filter((tick) => Number.isInteger(tick));
    for (const tick of epochs) this.add("text", { x: this.x(tick), y: foot + 17, "text-anchor": "middle" }, String(tick));
  }

  curve(curve, number) {
    const epochs = this.chart.epochs, few = epochs.length <= 40;
    if (curve.low) {
      const places = epochs.map((_, place) => place).filter((n) => this.drawn(curve.low[n]) && this.drawn(curve.high[n]));
      const there = places.map((n) => `${this.x(epochs[n])},${this.y(curve.high[n])}`);
      const back = places.map((n) => `${this.x(epochs[n])},${this.y(curve.low[n])}`).reverse();
      this.add("polygon", { class: `band curve-${number}`, points: [...there, ...back].join(" ") });
    }
    const places = epochs.map((_, place) => place).filter((n) => this.drawn(curve.values[n]));
    const points = places.map((n) => [this.x(epochs[n]), this.y(curve.values[n])]);
    this.add("polyline", { class: `line curve-${number}`, points: points.map((point) => point.join(",")).join(" ") });
    if (few) for (const [cx, cy] of points) this.add("circle", { class: `curve-${number}`, cx, cy, r: 2.5 });
    if (this.chart.best && places.length) {
      const best = places.reduce((a, b) => (curve.values[b] > curve.values[a] ? b : a));
      const place = { cx: this.x(epochs[best]), cy: this.y(curve.values[best]), r: 6 };
      this.add("circle", { class: `line curve-${number}`, ...place });
    }
  }

  point(event) {
    if (!this.x) return;
    const box = this.svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * this.svg.clientWidth;
    const away = this.chart.epochs.map((epoch) => Math.abs(this.x(epoch) - x));
    this.read(away.indexOf(Math.min(...away)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const last = this.chart.epochs.length - 1;
    this.read(this.place === null ? last : Math.min(last, Math.max(0, this.place + step)));
  }

  // Shows the values of one epoch; without one, what the last epochs ended with.
  read(place) {
    this.place = place;
    const epochs = this.chart.epochs, at = place === null ? epochs.length - 1 : place;
    const texts = this.chart.curves.map((curve) => curveText(curve, at) || `${curve.name} -`);
    this.output.replaceChildren(`epoch ${epochs[at]}: `, ...texts.flatMap((text, number) => {
      const part = document.createElement("span");
      part.className = `ink-${number % 3}`;
      part.textContent = text;
      return number ? [", ", part] : [part];
    }));
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(epochs[at]));
  }
}

function sortRows(table, column, kind, down) {
  const body = table.tBodies[0], sign = down ? -1 : 1;
  const key = (row) => {
    const cell = row.cells[column];
    return kind === "number" ? parseFloat(cell.dataset.value) : cell.textContent;
  };
  const compare = (a, b) => {
    if (kind !== "number") return sign * a.localeCompare(b, undefined, { numeric: true });
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // those without a value go last
    return sign * (a - b);
  };
  const rows = [...body.rows].map((row) => [key(row), row]);
  rows.sort((a, b) => compare(a[0], b[0]));
  body.append(...rows.map((pair) => pair[1]));
}

for (const button of document.querySelectorAll("table.sortable th button"))
  button.addEventListener("click", () => {
    const heading = button.parentElement, down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    sortRows(button.closest("table"), heading.cellIndex, button.dataset.kind, down);
  });

class Zoom {
  constructor(frame) {
    this.frame = frame;
    this.image = frame.querySelector("img");
    this.reset();
    frame.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = frame.getBoundingClientRect();
      this.zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    frame.addEventListener("pointerdown", (event) => frame.setPointerCapture(event.pointerId));
    frame.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) this.move(event.movementX, event.movementY);
    });
    frame.addEventListener("keydown", (event) => this.key(event));
  }

  reset() {
    [this.scale, this.left, this.top] = [1, 0, 0];
    this.show();
  }

  // Keeps the point (x, y) of the frame where it is.
  zoom(factor, x, y) {
    const scale = Math.min(12, Math.max(1, this.scale * factor)), ratio = scale / this.scale;
    [this.left, this.top, this.scale] = [x - (x - this.left) * ratio, y - (y - this.top) * ratio, scale];
    this.show();
  }

  move(x, y) {
    [this.left, this.top] = [this.left + x, this.top + y];
    this.show();
  }

  key(event) {
    const { clientWidth: width, clientHeight: height } = this.frame;
    const actions = {
      "+": () => this.zoom(1.2, width / 2, height / 2), "-": () => this.zoom(1 / 1.2, width / 2, height / 2),
      0: () => this.reset(), ArrowLeft: () => this.move(40, 0), ArrowRight: () => this.move(-40, 0),
      ArrowUp: () => this.move(0, 40), ArrowDown: () => this.move(0, -40),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  show() {
    const { clientWidth: width, clientHeight: height } = this.frame;
    this.left = Math.min(0, Math.max(width * (1 - this.scale), this.left));
    this.top = Math.min(0, Math.max(height * (1 - this.scale), this.top));
    this.image.style.transform = `translate(${this.left}px, ${this.top}px) scale(${this.scale})`;
  }
}

for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure);
for (const frame of document.querySelectorAll(".zoom .frame")) new Zoom(frame);
window.addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
