// Which learning rates each method survives: a row per method, a column per rate, survivors counted.
function drawRanges(box, ranges, tableOf) {
  box.replaceChildren(...ranges.flatMap((range) => [
    ...range.sentences.map((text, i) => html("p", { class: i ? "" : "first" }, text)),
    rangeMap(range),
    tableOf("Survivors, and the mean loss that they reached", range.rows),
  ]));
}

function rangeMap(range) {
  const card = html("div", { class: "card chart range" }, html("div", { class: "head" }, html("h3", {}, range.title)));
  const cell = (found) => {
    if (!found || !found.count) return html("td", { class: "untried" }, "–");
    const share = found.survived / found.count;
    const text = `${found.survived} of ${found.count} survived${found.loss === null ? "" : `, mean loss ${format(found.loss)}`}`;
    const dots = Array.from({ length: found.count }, (_, i) => html("i", { class: i < found.survived ? "alive" : "lost" }));
    return html("td", { style: `--share:${share}`, title: text }, html("span", { class: "dots", "aria-hidden": "true" }, ...dots), html("b", {}, `${found.survived}/${found.count}`));
  };
  const table = html("table", { class: "grid" },
    html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "method"), ...range.rates.map((rate) => html("th", { scope: "col" }, rate)))),
    html("tbody", {}, ...range.methods.map((method) => html("tr", {}, html("th", { scope: "row" }, method.name), ...method.cells.map(cell)))));
  card.append(html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": range.title }, table), html("p", { class: "sideways", "aria-hidden": "true" }, "scroll sideways for more →"),
    html("div", { class: "legend" }, html("span", { class: "key" }, html("i", { class: "dot alive" }), "survived"), html("span", { class: "key" }, html("i", { class: "dot lost" }), "collapsed or diverged"), html("span", {}, "columns: learning rate")));
  return card;
}
