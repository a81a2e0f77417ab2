// Draws which patches are left after some layers, and says of a patch where it went. Runs once when the page is loaded,
// with `element` (the part of the page that holds a study) and `watch` given by Gradio; the study itself is replaced
// after each answer, so listeners are on `element`. Layer and patch that somebody chose stay chosen.
const LOST = -1, SIDE = 448, SMALL = 56;
const chosen = { layers: null, groups: false, patch: null, pinned: false };

const all = (what) => [...element.querySelectorAll(what)];
const cards = () => all(".gtp-card").map((card) => ({ card, trace: (card.trace ??= JSON.parse(card.dataset.trace)) }));
const colour = (token) => `hsl(${(token * 222.5) % 360} 60% ${45 + ((token * 7548) % 10000) / 400}%)`;

function state(trace, layers) { // after so many layers; after none every patch is its own token
  const [rows, columns] = trace.grid, patches = [...Array(rows * columns).keys()];
  return layers ? trace.layers[layers - 1] : { kept: patches, owner: patches, size: null };
}

function counts(owner) {
  const found = new Map();
  for (const token of owner) if (token !== LOST) found.set(token, (found.get(token) ?? 0) + 1);
  return found;
}

function draw(canvas, trace, layers, side, mark) {
  const picture = element.querySelector(".gtp-picture");
  if (!picture?.complete || !picture.naturalWidth) return;
  const [rows, columns] = trace.grid, cell = Math.max(2, Math.floor(side / columns));
  canvas.width = columns * cell; canvas.height = rows * cell;
  const pen = canvas.getContext("2d"), { kept, owner, size } = state(trace, layers);
  const [high, wide] = [picture.naturalHeight / rows, picture.naturalWidth / columns];
  const place = (patch) => [(patch % columns) * cell, Math.floor(patch / columns) * cell];
  pen.imageSmoothingEnabled = false;
  if (chosen.groups) {
    const many = counts(owner);
    owner.forEach((token, patch) => {
      if (token === LOST) return;
      pen.fillStyle = many.get(token) === 1 ? "#8884" : colour(token);
      pen.fillRect(...place(patch), cell, cell);
    });
  } else {
    pen.globalAlpha = 0.15;
    pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    pen.globalAlpha = 1;
    kept.forEach((patch, token) => {
      if (patch >= rows * columns) return; // a token in no place
      const [x, y] = place(patch);
      pen.drawImage(picture, (patch % columns) * wide, Math.floor(patch / columns) * high, wide, high, x, y, cell, cell);
      if (mark) { // black patches that stay look like black ones that left, else
        pen.lineWidth = 1; pen.strokeStyle = "#8888"; pen.strokeRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
      }
      if (mark && cell >= 16 && size && size[token] >= 1.5) {
        pen.font = `bold ${Math.min(14, cell * 0.6)}px system-ui, sans-serif`;
        pen.lineWidth = 3; pen.strokeStyle = "#000"; pen.fillStyle = "#fff";
        pen.strokeText(Math.round(size[token]), x + 3, y + cell * 0.65);
        pen.fillText(Math.round(size[token]), x + 3, y + cell * 0.65);
      }
    });
  }
  if (!mark || chosen.patch === null || chosen.patch >= owner.length) return;
  const token = owner[chosen.patch];
  owner.forEach((other, patch) => {
    if (patch !== chosen.patch && (token === LOST || other !== token)) return;
    const [x, y] = place(patch), own = patch === chosen.patch;
    pen.lineWidth = own ? 4 : 2;
    pen.strokeStyle = "#000"; pen.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
    pen.lineWidth = own ? 2 : 1;
    pen.strokeStyle = own ? "#ffd400" : "#fff"; pen.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
  });
}

function where(patch, columns) {
  return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
}

function told(trace, layers) {
  const [rows, columns] = trace.grid, patch = chosen.patch;
  if (patch === null || patch >= rows * columns) {
    return "Point at a patch, tap it, or use the arrow keys: it says which token stands for it. A click holds it.";
  }
  const { kept, owner, size } = state(trace, layers), token = owner[patch];
  const left = trace.layers.slice(0, layers).findIndex((each) => !each.kept.includes(patch));
  const gone = left < 0 ? "" : ` It left in layer ${left + 1}.`;
  const start = `Patch at ${where(patch, columns)}, after ${layers} layers: `;
  if (token === LOST) return `${start}lost, no token stands for it.${gone}`;
  const own = kept[token], group = counts(owner).get(token);
  const owned = own === patch ? "its token is its own" : own >= rows * columns
    ? "its owner is a fused token, which has no place" : `its owner is the patch at ${where(own, columns)}`;
  const many = group === 1 ? "nobody else is in its group" : `its group has ${group} patches`;
  return `${start}${owned}; ${many}; size ${size ? size[token] : 1}.${gone}`;
}

function strip(card, trace, layers) {
  const room = card.querySelector(".gtp-strip");
  if (!room.children.length) {
    for (let number = 0; number <= trace.layers.length; number++) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.layers = number;
      const left = number ? trace.layers[number - 1].kept.length : trace.grid[0] * trace.grid[1];
      button.setAttribute("aria-label", `after ${number} layers: ${left} tokens`);
      button.append(document.createElement("canvas"), `${number}: ${left}`);
      room.append(button);
    }
  }
  for (const button of room.children) {
    button.setAttribute("aria-pressed", Number(button.dataset.layers) === layers);
    draw(button.firstChild, trace, Number(button.dataset.layers), SMALL, false);
  }
}

function now() { // how many layers are shown
  const range = element.querySelector(".gtp-layer");
  return range ? Math.min(chosen.layers ?? Number(range.max), Number(range.max)) : 0;
}

function show(strips) {
  const layers = now(), range = element.querySelector(".gtp-layer");
  if (!range) return;
  range.value = layers;
  element.querySelector(".gtp-layer-name").textContent = `${layers} of ${range.max}`;
  element.querySelector(".gtp-groups").checked = chosen.groups;
  for (const { card, trace } of cards()) {
    draw(card.querySelector(".gtp-map"), trace, layers, SIDE, true);
    const text = card.querySelector(".gtp-patch"), say = told(trace, layers);
    if (text.textContent !== say) text.textContent = say;
    if (strips) strip(card, trace, layers);
  }
}

function at(event) { // the patch under a pointer
  const { trace } = cards().find(({ card }) => card.contains(event.target));
  const box = event.target.getBoundingClientRect(), [rows, columns] = trace.grid;
  const place = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
  const row = place((event.clientY - box.top) / box.height, rows);
  return row * columns + place((event.clientX - box.left) / box.width, columns);
}

const onMap = (event) => event.target.classList?.contains("gtp-map");
element.addEventListener("pointermove", (event) => {
  if (!onMap(event) || chosen.pinned) return;
  const patch = at(event);
  if (patch !== chosen.patch) { chosen.patch = patch; show(false); }
});
element.addEventListener("click", (event) => {
  const button = event.target.closest?.(".gtp-strip button");
  if (button) { chosen.layers = Number(button.dataset.layers); show(true); return; }
  if (!onMap(event)) return;
  const patch = at(event);
  chosen.pinned = !(chosen.pinned && patch === chosen.patch);
  chosen.patch = patch;
  show(false);
});
element.addEventListener("input", (event) => {
  if (event.target.matches(".gtp-layer")) { chosen.layers = Number(event.target.value); show(true); }
  if (event.target.matches(".gtp-groups")) { chosen.groups = event.target.checked; show(true); }
});
element.addEventListener("keydown", (event) => {
  if (!onMap(event)) return;
  const { trace } = cards().find(({ card }) => card.contains(event.target)), [rows, columns] = trace.grid;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (event.key === "Escape") { chosen.patch = null; chosen.pinned = false; }
  else if (step === undefined) return;
  else {
    const from = chosen.patch ?? 0, to = chosen.patch === null ? 0 : from + step;
    const sideways = Math.abs(step) === 1 && Math.floor(to / columns) !== Math.floor(from / columns);
    if (to >= 0 && to < rows * columns && !sideways) chosen.patch = to;
    chosen.pinned = true;
  }
  event.preventDefault();
  show(false);
});

function begin() {
  const picture = element.querySelector(".gtp-picture");
  if (!picture) return;
  if (picture.complete && picture.naturalWidth) show(true);
  else picture.addEventListener("load", () => show(true), { once: true });
}
watch("value", begin);
begin();
