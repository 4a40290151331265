// Which learning rates each method survives: a row per method, a column per rate, survivors counted; and the losses.
const chosenRates = new Map();
const rateText = (rate) => rate.toExponential();  // 1.6e-2, as in the verdict
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function drawRanges(box, ranges, tableOf) {
  const waiting = [];
  box.replaceChildren(...ranges.flatMap((range, number) => {
    const colour = (method) => `var(--m${range.methods.indexOf(method) % 8})`;
    const losses = html("div", { class: "card chart range-losses" });
    if (range.runs.some((run) => run.curve[0].length)) waiting.push(() => drawRangeLosses(losses, range, colour, number));
    else losses.hidden = true;
    return [rangeMap(range, colour), losses, tableOf("Per method", range.rows), ...rangeSamples(range, colour)];
  }));
  for (const drawNow of waiting) drawNow();  // a chart measures its box, so that the box must stand on the page
}

function rangeMap(range, colour) {
  const title = `${range.title}: who survives at which learning rate`;
  const cell = (found) => {
    if (!found || !found.count) return html("td", { class: "untried" }, "–");
    const outcomes = Object.entries(found.outcomes).map(([name, count]) => `${count} ${name}`).join(", ");
    const text = `${outcomes || `${found.survived} of ${found.count} survived`}; best loss ${format(found.best)}, last ${format(found.last)} (medians)`;
    const dots = Array.from({ length: found.count }, (_, i) => html("i", { class: i < found.survived ? "alive" : "lost" }));
    return html("td", { style: `--share:${found.survived / found.count}`, title: text }, html("span", { class: "dots", "aria-hidden": "true" }, ...dots), html("b", {}, `${found.survived} of ${found.count}`),
      html("small", {}, found.best === null ? "" : `loss ${format(Number(found.best.toPrecision(2)))}`));
  };
  const table = html("table", { class: "grid" },
    html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "method"), ...range.rates.map((rate) => html("th", { scope: "col" }, rate === range.your_rate ? `${rateText(rate)} (yours)` : rateText(rate))))),
    html("tbody", {}, ...range.methods.map((method, i) => html("tr", {}, html("th", { scope: "row", style: `--c:${colour(method)}` }, html("i"), method), ...range.cells[i].map(cell)))));
  const yours = range.your_rate && !range.rates.includes(range.your_rate) ? ` Your rate is ${rateText(range.your_rate)}.` : "";
  return html("div", { class: "card range" }, html("div", { class: "head" }, html("h3", {}, title)),
    html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table), html("p", { class: "sideways", "aria-hidden": "true" }, "scroll sideways for more →"),
    html("div", { class: "legend" }, html("span", { class: "key" }, html("i", { class: "dot alive" }), "survived"), html("span", { class: "key" }, html("i", { class: "dot lost" }), "lost"),
      html("span", {}, `Columns are learning rates; the loss is the median of the runs' smallest smoothed losses.${yours} ${sentence(range.rule)}.`)));
}

// The smoothed losses of all runs at one rate: first at the rate where the methods differ most.
function drawRangeLosses(box, range, colour, number) {
  const spreadAt = (i) => { const shares = range.cells.map((row) => row[i]).filter((cell) => cell && cell.count).map((cell) => cell.survived / cell.count); return shares.length ? Math.max(...shares) - Math.min(...shares) : -1; };
  const chosen = chosenRates.get(number) ?? range.rates.reduce((best, _, i) => spreadAt(i) > spreadAt(best) ? i : best, 0);
  const select = html("select", { "aria-label": "learning rate", id: `range-rate-${number}` }, ...range.rates.map((rate, i) => html("option", { value: i, ...(i === chosen ? { selected: "" } : {}) }, rateText(rate))));
  select.addEventListener("change", () => { chosenRates.set(number, Number(select.value)); drawRangeLosses(box, range, colour, number); box.querySelector("select").focus(); });
  const groups = range.methods.map((method) => ({ label: method, colour: colour(method), seedsOnly: true, lines: range.runs.filter((run) => run.method === method && run.rate === range.rates[chosen] && run.curve[0].length).map((run) => ({ x: run.curve[0], y: run.curve[1] })) })).filter((group) => group.lines.length);
  drawChart(box, { title: `Smoothed training loss of every run at a rate of ${rateText(range.rates[chosen])}`, yLabel: "loss", log: true, groups, controls: html("label", { class: "check" }, "rate ", select) });
}

function rangeSamples(range, colour) {
  if (!range.samples.length) return [];
  return [html("div", { class: "tiles" }, ...range.samples.map((sample) => html("div", { class: "card tile", style: `--c:${colour(sample.method)}` },
    html("h3", {}, `${sample.method}, rate ${rateText(sample.rate)}`, html("small", {}, `seed ${sample.seed}: ${sample.outcome}`)), html("img", { src: sample.image, alt: `Samples of ${sample.method}: ${sample.outcome}` }),
    ...(sample.caption ? [html("p", { class: "hint" }, sample.caption)] : []))))];
}
