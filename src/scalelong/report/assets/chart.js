"use strict";
// A line chart in plain SVG: thin lines for seeds, thick ones for means, a legend, and a cursor for pointer and keys.
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") node.style.cssText = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toString();
}

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const ticks = [];
  for (let tick = Math.ceil(low / unit) * unit; tick <= high + unit * 1e-6; tick += unit) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const span = Math.log10(high / low);
  const factors = span > 4 ? [1] : span > 1 ? [1, 2, 5] : null;
  if (!factors) return niceTicks(low, high, 7).filter((tick) => tick > 0);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors) { const tick = factor * 10 ** power; if (tick >= low && tick <= high) ticks.push(Number(tick.toPrecision(6))); }
  return ticks;
}

// The mean of several runs, at the steps that all of them have.
function meanOf(lines) {
  if (lines.length === 1) return lines[0];
  const lookups = lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
  const x = lines[0].x.filter((step) => lookups.every((lookup) => lookup.get(step) !== undefined && lookup.get(step) !== null));
  return { x, y: x.map((step) => lookups.reduce((sum, lookup) => sum + lookup.get(step), 0) / lookups.length) };
}

// Room inside a box, so that a chart fills it and its text is as large as the page's.
function roomIn(box) {
  const style = getComputedStyle(box);
  return Math.max(240, box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

function legendOf(groups) {
  return html("div", { class: "legend" }, ...groups.map((group) => html("span", { class: group.dash ? "key dashed" : "key", style: `--c:${group.colour}` }, html("i"), group.label)));
}

// options: title, yLabel, log, xLabel, groups: [{label, colour, lines: [{x, y}], dots}], band: {x, low, high}, integer,
// zero (draw a line there), marks: [{x, colour, text}], controls (a node beside the title)
function drawChart(box, options) {
  const narrow = window.innerWidth <= 760, width = roomIn(box);
  const height = box.classList.contains("tall") ? (narrow ? 300 : 380) : narrow ? 260 : 300;
  const margin = { left: options.yLabel ? 66 : 50, right: 14, top: 10, bottom: 40 };
  const groups = options.groups.map((group) => ({ ...group, mean: meanOf(group.lines) })).filter((group) => group.mean.x.length);
  const usable = (value) => value !== null && value !== undefined && (!options.log || value > 0);
  const values = groups.flatMap((group) => group.lines.flatMap((line) => line.y.filter(usable)));
  if (options.band) values.push(...options.band.low.filter(usable), ...options.band.high.filter(usable));
  if (options.zero) values.push(0);
  const steps = groups.flatMap((group) => group.lines.flatMap((line) => line.x));
  box.replaceChildren(html("div", { class: "head" }, html("h3", {}, options.title), ...(options.controls ? [options.controls] : [])));
  if (!groups.length || !values.length) { box.append(html("p", { class: "hint" }, "Nothing to show: no method is selected, or this was not recorded.")); return; }
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (options.range) [low, high] = options.range;
  else if (options.log) { const room = Math.max((high / low) ** 0.04, 1.01); low /= room; high *= room; }
  else { const room = (high - low || Math.abs(high) || 1) * 0.05; low -= room; high += room; }
  const first = steps.reduce((a, b) => Math.min(a, b)), most = steps.reduce((a, b) => Math.max(a, b)), last = most === first ? first + 1 : most;
  const toX = (step) => margin.left + (step - first) / (last - first) * (width - margin.left - margin.right);
  const scale = options.log ? Math.log : (value) => value;
  const toY = (value) => height - margin.bottom - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (height - margin.top - margin.bottom);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": `${options.title}: ${groups.map((group) => `${group.label} ends at ${format(group.mean.y.at(-1))}`).join(", ")}` });
  for (const tick of options.log ? logTicks(low, high) : niceTicks(low, high, 5)) {
    svg.append(element("line", { class: "gridline", x1: margin.left, x2: width - margin.right, y1: toY(tick), y2: toY(tick) }),
      element("text", { x: margin.left - 8, y: toY(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  const xTicks = options.integer ? [...new Set(steps)].sort((a, b) => a - b) : niceTicks(first, last, width / 90);
  for (const tick of xTicks) svg.append(element("text", { x: toX(tick), y: height - margin.bottom + 17, "text-anchor": "middle" }, format(tick)));
  svg.append(element("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom }),
    element("text", { x: (margin.left + width - margin.right) / 2, y: height - 5, "text-anchor": "middle", class: "x-label" }, options.xLabel || "training step"));
  if (options.yLabel) svg.append(element("text", { class: "y-label", "text-anchor": "middle", transform: `translate(13 ${(margin.top + height - margin.bottom) / 2}) rotate(-90)` }, options.yLabel));
  const path = (line) => line.x.map((step, i) => usable(line.y[i]) ? [toX(step), toY(line.y[i])] : null)
    .reduce((text, point, i, all) => point ? `${text}${i && all[i - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}` : text, "");
  if (options.band) {
    const upper = options.band.x.map((step, i) => `${toX(step)} ${toY(options.band.high[i])}`);
    const lower = options.band.x.map((step, i) => `${toX(step)} ${toY(options.band.low[i])}`).reverse();
    svg.append(element("path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: "var(--band)" }));
  }
  for (const mark of options.marks || []) if (mark.x >= first && mark.x <= last) {
    const x = toX(mark.x), y = height - margin.bottom;
    svg.append(element("path", { class: "mark", d: `M${x - 5} ${y}L${x + 5} ${y}L${x} ${y - 9}Z`, fill: mark.colour }, element("title", {}, mark.text)));
  }
  for (const group of groups) {
    if (group.lines.length > 1) for (const line of group.lines) svg.append(element("path", { d: path(line), fill: "none", stroke: group.colour, "stroke-width": group.seedsOnly ? 1.4 : 1, opacity: group.seedsOnly ? 0.75 : 0.4 }));
    if (group.seedsOnly && group.lines.length > 1) continue;  // survivors and collapses have no mean that means something
    svg.append(element("path", { d: path(group.mean), fill: "none", stroke: group.colour, "stroke-width": group.dash ? 1.6 : 2.4, "stroke-dasharray": group.dash ? "6 4" : "none", "stroke-linejoin": "round", class: "line", "data-label": group.label }));
    const alone = group.mean.x.length === 1;
    if (group.dots || alone) group.mean.x.forEach((step, i) => usable(group.mean.y[i]) && svg.append(element("circle", { cx: toX(step), cy: toY(group.mean.y[i]), r: 3.5, fill: group.colour })));
  }
  box.append(svg, legendOf(groups));
  attachCursor(box, svg, groups, { toX, toY, margin, width, height, usable, xName: options.xName || "step", unit: options.unit || "" });
}

function attachCursor(box, svg, groups, place) {
  const all = [...new Set(groups.flatMap((group) => group.mean.x))].sort((a, b) => a - b);
  const layer = element("g"), tip = html("div", { class: "tip", hidden: "", "aria-live": "polite" });
  svg.append(layer); box.append(tip);
  let position = -1;
  const show = (index) => {
    position = Math.max(0, Math.min(all.length - 1, index));
    const step = all[position], x = place.toX(step);
    layer.replaceChildren(element("line", { class: "cursor", x1: x, x2: x, y1: place.margin.top, y2: place.height - place.margin.bottom }));
    tip.replaceChildren(html("b", {}, `${place.xName} ${format(step)}`));
    for (const group of groups) {
      const value = valueAt(group.mean, step);
      if (value === null) continue;
      if (place.usable(value)) layer.append(element("circle", { cx: x, cy: place.toY(value), r: 4, fill: group.colour, stroke: "var(--card)", "stroke-width": 1.5 }));
      tip.append(html("span", {}, html("i", { style: `--c:${group.colour}` }), group.label, html("em", {}, `${format(value)}${place.unit}`)));
    }
    tip.hidden = false;
    const share = svg.clientWidth / place.width, right = x > place.width / 2;
    tip.style.top = `${svg.offsetTop + 8}px`;
    tip.style.left = right ? "" : `${svg.offsetLeft + x * share + 12}px`;
    tip.style.right = right ? `${box.clientWidth - svg.offsetLeft - x * share + 12}px` : "";
  };
  const hide = () => { tip.hidden = true; layer.replaceChildren(); };
  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect(), x = (event.clientX - bounds.left) / bounds.width * place.width;
    let best = 0;
    all.forEach((step, i) => { if (Math.abs(place.toX(step) - x) < Math.abs(place.toX(all[best]) - x)) best = i; });
    show(best);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const stride = event.shiftKey ? 10 : 1, moves = { ArrowRight: position + stride, ArrowLeft: position - stride, Home: 0, End: all.length - 1 };
    if (event.key in moves) { event.preventDefault(); show(position < 0 && event.key === "ArrowLeft" ? all.length - 1 : moves[event.key]); }
    if (event.key === "Escape") hide();
  });
}

// The value of a line at a step, linear between its points; null outside.
function valueAt(line, step) {
  const after = line.x.findIndex((x) => x >= step);
  if (after < 0 || line.y[after] === null) return null;
  if (line.x[after] === step) return line.y[after];
  if (after === 0 || line.y[after - 1] === null) return null;
  const share = (step - line.x[after - 1]) / (line.x[after] - line.x[after - 1]);
  return line.y[after - 1] + share * (line.y[after] - line.y[after - 1]);
}
