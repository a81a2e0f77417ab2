"""Scripts of a page: tables that sort, and the figures of a point. It reads well without, too."""

from __future__ import annotations

# A column sorts by the numbers its cells begin with; cells without one, e.g. "not timed", come last either way.
# A plot is one stop of the tab key, and arrow keys walk along its points. Nothing is fetched.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      for (const other of headers) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => { const text = row.cells[column].textContent.trim(); return [parseFloat(text), text]; };
      const rows = [...body.rows].map(row => [...key(row), row]);
      rows.sort(([a, left], [b, right]) => isNaN(a) || isNaN(b)
        ? isNaN(a) - isNaN(b) || (up ? 1 : -1) * left.localeCompare(right)
        : (up ? 1 : -1) * (a - b));
      body.append(...rows.map(([, , row]) => row));
    });
  });
}
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);
function show(point) {
  tip.textContent = point.getAttribute("aria-label");
  tip.hidden = false;
  const spot = point.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const left = Math.min(spot.right + 8, document.documentElement.clientWidth - box.width - 8);
  const above = spot.top - box.height - 8;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (above < 8 ? spot.bottom + 8 : above) + "px";
}
const hide = () => { tip.hidden = true; };
for (const plot of document.querySelectorAll("svg")) {
  const points = [...plot.querySelectorAll("circle")];
  if (points.length) plot.setAttribute("role", "group");
  points.forEach((point, index) => {
    const title = point.querySelector("title");
    point.setAttribute("aria-label", title.textContent);
    title.remove();  // or the browser would show its own as well
    point.setAttribute("role", "img");
    point.setAttribute("tabindex", index ? "-1" : "0");
    point.addEventListener("pointerenter", () => show(point));
    point.addEventListener("pointerleave", hide);
    point.addEventListener("focus", () => show(point));
    point.addEventListener("blur", hide);
    point.addEventListener("keydown", event => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const next = points[(index + step + points.length) % points.length];
      point.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  });
}
addEventListener("scroll", hide, {passive: true});
"""

STYLE = """
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort] button::after { content: "\\2195"; opacity: .4; padding-left: 4px; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; }
svg circle { stroke: transparent; stroke-width: 8px; cursor: help; outline: none; }
svg circle:hover, svg circle:focus { stroke: var(--ink); stroke-width: 2px; }
#tip { position: fixed; z-index: 1; max-width: min(420px, 90vw); padding: 6px 10px; border-radius: 6px; color: white;
       background: var(--ink); font-size: .85rem; white-space: pre-wrap; pointer-events: none; }
#tip[hidden] { display: none; }
@media print { #tip { display: none; } th[aria-sort] button::after { content: ""; padding: 0; } }
"""
