
// The viewer of one case: three planes through a small volume, the patient's right on the left, anterior or superior up.

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

class Volume {
  constructor(content) {
    this.shape = content.shape;
    this.spacing = content.spacing;
    this.image = bytes(content.image);
    this.label = bytes(content.label);
    this.prediction = bytes(content.prediction);
  }

  // The index of a voxel: z runs fastest.
  index(voxel) {
    return (voxel[0] * this.shape[1] + voxel[1]) * this.shape[2] + voxel[2];
  }
}

class Plane {
  constructor(figure, viewer) {
    this.viewer = viewer;
    this.axis = Number(figure.dataset.axis);
    [this.across, this.up] = [0, 1, 2].filter((axis) => axis !== this.axis);
    this.canvas = figure.querySelector("canvas");
    this.slider = figure.querySelector("input");
    this.output = figure.querySelector("output");
    const { shape, spacing } = viewer.volume;
    [this.columns, this.rows] = [shape[this.across], shape[this.up]];
    const longest = Math.max(...shape.map((side, axis) => side * spacing[axis]));
    const pixels = 640 / longest;
    this.canvas.width = Math.max(8, Math.round(this.columns * spacing[this.across] * pixels));
    this.canvas.height = Math.max(8, Math.round(this.rows * spacing[this.up] * pixels));
    this.slice = document.createElement("canvas");
    [this.slice.width, this.slice.height] = [this.columns, this.rows];
    this.slider.max = shape[this.axis] - 1;
    this.slider.addEventListener("input", () => viewer.go(this.axis, Number(this.slider.value)));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("pointerdown", (event) => this.click(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons & 1 && this.click(event));
  }

  // At either end the page scrolls on.
  wheel(event) {
    const before = this.viewer.place[this.axis];
    this.viewer.go(this.axis, before + (event.deltaY < 0 ? 1 : -1));
    if (this.viewer.place[this.axis] !== before) event.preventDefault();
  }

  key(event) {
    const last = this.viewer.volume.shape[this.axis] - 1;
    const step = {
      ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -last, End: last,
    }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.viewer.go(this.axis, this.viewer.place[this.axis] + step);
  }

  click(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
    this.viewer.go(this.across, this.columns - 1 - column);
    this.viewer.go(this.up, this.rows - 1 - row);
  }

  // Calls `use(pixel, value, column, row)` for each pixel of this plane of a volume.
  each(volume, use) {
    const voxel = [...this.viewer.place];
    for (let row = 0; row < this.rows; row++)
      for (let column = 0; column < this.columns; column++) {
        voxel[this.across] = this.columns - 1 - column;
        voxel[this.up] = this.rows - 1 - row;
        use(row * this.columns + column, volume[this.viewer.volume.index(voxel)], column, row);
      }
  }

  draw() {
    const { volume, place } = this.viewer;
    this.slider.value = place[this.axis];
    this.output.textContent = `${place[this.axis] + 1} / ${volume.shape[this.axis]}`;
    const context = this.canvas.getContext("2d");
    this.paint(context, volume.image, true, (value) => [value, value, value, 255]);
    if (this.viewer.shown("show-prediction")) {
      context.globalAlpha = this.viewer.opacity();
      this.paint(context, volume.prediction, false, (value) => (value ? [...this.viewer.rgb(value), 255] : [0, 0, 0, 0]));
      context.globalAlpha = 1;
    }
    if (this.viewer.shown("show-truth")) this.outline(context);
    if (this.viewer.shown("show-cross")) this.cross(context);
    this.letters(context);
  }

  paint(context, volume, smooth, colour) {
    const pixels = new ImageData(this.columns, this.rows);
    this.each(volume, (pixel, value) => pixels.data.set(colour(value), 4 * pixel));
    this.slice.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = smooth;
    context.drawImage(this.slice, 0, 0, this.canvas.width, this.canvas.height);
  }

  // Draws the edges of the true labels, each on the inner side, so that neighbours stay apart.
  outline(context) {
    const labels = new Uint8Array(this.columns * this.rows);
    this.each(this.viewer.volume.label, (pixel, value) => (labels[pixel] = value));
    const wide = this.canvas.width / this.columns, high = this.canvas.height / this.rows, line = 2.5;
    const at = (column, row) =>
      column < 0 || row < 0 || column >= this.columns || row >= this.rows ? 0 : labels[row * this.columns + column];
    for (let row = 0; row < this.rows; row++)
      for (let column = 0; column < this.columns; column++) {
        const label = at(column, row);
        if (!label) continue;
        context.fillStyle = this.viewer.colour(label);
        const x = column * wide, y = row * high;
        if (at(column - 1, row) !== label) context.fillRect(x, y, line, high);
        if (at(column + 1, row) !== label) context.fillRect(x + wide - line, y, line, high);
        if (at(column, row - 1) !== label) context.fillRect(x, y, wide, line);
        if (at(column, row + 1) !== label) context.fillRect(x, y + high - line, wide, line);
      }
  }

  cross(context) {
    const x = ((this.columns - 0.5 - this.viewer.place[this.across]) / this.columns) * this.canvas.width;
    const y = ((this.rows - 0.5 - this.viewer.place[this.up]) / this.rows) * this.canvas.height;
    context.fillStyle = "rgba(255, 255, 255, 0.35)";
    context.fillRect(x, 0, 1, this.canvas.height);
    context.fillRect(0, y, this.canvas.width, 1);
  }

  letters(context) {
    const [left, top] = [["A", "S"], ["R", "S"], ["R", "A"]][this.axis];
    context.font = "18px sans-serif";
    context.fillStyle = "#fff";
    context.strokeStyle = "#000";
    context.lineWidth = 3;
    for (const [letter, x, y] of [[left, 6, this.canvas.height / 2 + 6], [top, this.canvas.width / 2 - 6, 20]]) {
      context.strokeText(letter, x, y);
      context.fillText(letter, x, y);
    }
  }
}

class Viewer {
  constructor(section, content) {
    this.names = content.names;
    this.colours = content.colours;
    this.volume = new Volume(content);
    this.place = [...content.start];
    this.planes = [...section.querySelectorAll(".plane")].map((figure) => new Plane(figure, this));
    for (const input of section.querySelectorAll(".controls input")) input.addEventListener("input", () => this.draw());
    for (const label of content.labels) this.note(label);
    this.draw();
  }

  shown(id) {
    return document.getElementById(id).checked;
  }

  opacity() {
    return Number(document.getElementById("opacity").value) / 100;
  }

  colour(label) {
    return this.colours[(label - 1) % this.colours.length];
  }

  rgb(label) {
    const colour = this.colour(label);
    return [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  }

  name(label) {
    return label ? this.names[label] || `label ${label}` : "background";
  }

  note(label) {
    const item = document.createElement("li"), square = document.createElement("span");
    square.className = "square";
    square.style.background = this.colour(label);
    item.append(square, `${label}: ${this.name(label)}`);
    document.getElementById("legend").append(item);
  }

  go(axis, place) {
    const next = Math.min(this.volume.shape[axis] - 1, Math.max(0, place));
    if (next === this.place[axis]) return;
    this.place[axis] = next;
    this.draw();
  }

  draw() {
    for (const plane of this.planes) plane.draw();
    const at = this.volume.index(this.place);
    const truth = this.name(this.volume.label[at]), found = this.name(this.volume.prediction[at]);
    document.getElementById("voxel").textContent = `At the cross-hair: truth ${truth}, prediction ${found}.`;
  }
}

if (data.volume) new Viewer(document.getElementById("viewer"), data.volume);
