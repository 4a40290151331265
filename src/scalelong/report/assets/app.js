// Puts the pieces together. All state is here: which methods are shown, and the positions of the sliders.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const shown = new Set(data.methods);
  const colour = (label) => `var(--m${Math.max(0, data.methods.indexOf(label)) % 8})`;
  const runsOf = (label) => data.runs.filter((run) => run.label === label);
  const visible = () => data.methods.filter((label) => shown.has(label));
  const line = (run, name) => run.curves[name] ? { x: run.curves[name][0], y: run.curves[name][1] } : null;
  const lastStep = Math.max(0, ...data.runs.map((run) => Object.values(run.curves).reduce((most, curve) => Math.max(most, curve[0].at(-1) || 0), 0)));

  function groups(name) {
    return visible().map((label) => ({ label, colour: colour(label), lines: runsOf(label).map((run) => line(run, name)).filter(Boolean) })).filter((group) => group.lines.length);
  }

  // The system's theme, also when it changes, until somebody chooses. Only a choice is stored; under the name
  // "scalelong-theme" older reports stored the system's as well.
  const STORED = "scalelong-chosen-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosenTheme = new URLSearchParams(location.search).get("theme");
  function applyTheme() { document.documentElement.dataset.theme = chosenTheme || (system.matches ? "dark" : "light"); }

  function startTheme() {
    try { chosenTheme ||= localStorage.getItem(STORED); } catch { /* a file opened from disk may have no storage */ }
    applyTheme();
    system.addEventListener("change", () => { applyTheme(); draw(); });
    find("theme").addEventListener("click", () => {
      chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem(STORED, chosenTheme); } catch { /* then it holds for this page */ }
      applyTheme(); draw();
    });
  }

  function makeToggles() {
    for (const label of data.methods) {
      const button = html("button", { type: "button", class: "toggle", "aria-pressed": "true", "data-method": label, style: `--c:${colour(label)}` }, html("i"), label);
      button.addEventListener("click", () => {
        if (shown.has(label)) shown.delete(label); else shown.add(label);
        button.setAttribute("aria-pressed", String(shown.has(label)));
        draw();
      });
      find("methods").append(button);
    }
    find("methods").closest("nav").hidden = data.methods.length < 2;
  }

  function drawVerdict() {
    find("verdict").hidden = !data.verdict.some((entry) => entry.text.length);
    find("verdict-text").replaceChildren(...data.verdict.flatMap((entry) => [
      ...(entry.title ? [html("h3", {}, entry.title)] : []),
      ...entry.text.map((text, i) => html("p", { class: i ? "" : "first" }, text)),
    ]));
  }

  // A table that says when it can be scrolled sideways; the title stands above, where nothing is cut.
  function tableOf(title, rows, rowLabel) {
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const head = html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, term(name))));
    const body = rows.map((row) => {
      const label = rowLabel ? rowLabel(row) : null;
      return html("tr", { class: label && !shown.has(label) ? "off" : "" }, ...columns.map((name, i) => i || !label ? html("td", {}, String(row[name] ?? "–")) : html("th", { scope: "row", style: `--c:${colour(label)}` }, html("i"), row[name])));
    });
    const scroll = html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title || "table" }, html("table", {}, html("thead", {}, head), html("tbody", {}, ...body)));
    return html("div", { class: "card table" }, ...(title ? [html("h3", {}, title)] : []), scroll, html("p", { class: "sideways", "aria-hidden": "true" }, "scroll sideways for more →"));
  }

  function noteOverflow() {
    for (const scroll of document.querySelectorAll(".scroll")) scroll.parentElement.classList.toggle("overflows", scroll.scrollWidth > scroll.clientWidth + 1);
  }

  const labelOf = (row) => data.methods.find((method) => method === row.method) || row.method;

  function drawTables() {
    find("tables").replaceChildren(...data.tables.map((table) => tableOf(table.title, table.rows, labelOf)));
    for (const run of data.runs) if (run.diverged !== null) find("tables").append(html("p", { class: "warn" }, `${run.label}, seed ${run.seed} diverged. ${run.diverged}`));
    find("scores-section").hidden = !data.scores.length;
    if (data.scores.length) find("scores").replaceChildren(tableOf("Value and 95 % interval, from scores.jsonl", data.scores, labelOf));
  }

  // Samples beside their nearest training images.
  function drawCopies() {
    const found = (data.copies ?? []).filter((entry) => shown.has(entry.method));
    find("copies-section").hidden = !found.length;
    find("copies").replaceChildren(...found.map((entry) => html("div", { class: "card tile", style: `--c:${colour(entry.method)}` },
      html("h3", {}, entry.method, html("small", {}, `seed ${entry.seed}, step ${entry.step}`)),
      html("img", { src: entry.image, alt: `Samples of ${entry.method} above their nearest training images` }), html("p", { class: "hint" }, entry.text))));
  }

  // Alarms of the stability monitor. Many alarms are one story: the first of each run and kind are shown.
  const watched = data.runs.some((run) => Object.keys(run.curves).some((name) => name.startsWith("probe_block_rms/") || name.startsWith("gradient_norm/")));
  const MOST_ALARMS = 40;
  function drawAlarms() {
    find("alarms-section").hidden = !watched && !data.alarms.length;
    if (!data.alarms.length) { find("alarms").replaceChildren(html("p", { class: "hint" }, "No alarm: no spike, no collapse, no dead skip, nothing infinite in the readings.")); return; }
    const rows = data.alarms.slice(0, MOST_ALARMS).map((alarm) => ({ method: alarm.method, seed: alarm.seed, step: alarm.step, alarm: alarm.kind, "what was seen": alarm.message }));
    const rest = data.alarms.length - rows.length;
    find("alarms").replaceChildren(tableOf(`${data.alarms.length} alarm${data.alarms.length === 1 ? "" : "s"}`, rows, labelOf), ...(rest > 0 ? [html("p", { class: "hint" }, `and ${rest} more`)] : []));
  }

  const kappaNames = (run) => Object.keys(run.curves).filter((name) => name.startsWith("kappa/")).sort((a, b) => a.slice(6) - b.slice(6));
  const distinct = (steps) => [...new Set(steps.length ? [...steps, lastStep] : [])].sort((a, b) => a - b);
  const readingSteps = distinct(data.runs.flatMap((run) => kappaNames(run).slice(0, 1).flatMap((name) => run.curves[name][0])));
  const sampleSteps = distinct(data.runs.flatMap((run) => run.samples.map((sample) => sample.step)));

  // The mean over seeds of κ and RMS of every skip at the reading closest to a step.
  function skipsAt(label, step) {
    const runs = runsOf(label).filter((run) => kappaNames(run).length);
    if (!runs.length) return [];
    const near = (curve) => { let best = 0; curve[0].forEach((s, i) => { if (Math.abs(s - step) < Math.abs(curve[0][best] - step)) best = i; }); return curve[1][best]; };
    const mean = (values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    return kappaNames(runs[0]).map((name) => ({
      kappa: mean(runs.filter((run) => run.curves[name]).map((run) => near(run.curves[name])).filter((value) => value !== null)) ?? 0,
      rms: mean(runs.filter((run) => run.curves[`probe_skip_rms/${name.slice(6)}`]).map((run) => near(run.curves[`probe_skip_rms/${name.slice(6)}`])).filter((value) => value !== null)),
    }));
  }

  function drawSkips() {
    if (!readingSteps.length) { find("skips").hidden = true; return; }
    const step = readingSteps[find("skip-step").value];
    find("skip-step-out").value = step;
    find("skip-step").setAttribute("aria-valuetext", `step ${step}`);
    find("skip-step").closest(".slider").hidden = readingSteps.length < 2;
    const found = visible().map((label) => ({ label, skips: skipsAt(label, step) })).filter((entry) => entry.skips.length);
    const largest = Math.max(1e-12, ...found.flatMap((entry) => entry.skips.map((skip) => skip.kappa * (skip.rms ?? 1))));
    find("maps").replaceChildren(...found.map((entry) => html("div", { class: "card tile", style: `--c:${colour(entry.label)}` },
      html("h3", {}, entry.label, html("small", {}, `${entry.skips.length} long skips`)), drawMap(entry.skips, largest, entry.label))));
    const count = Math.max(1, ...found.map((entry) => entry.skips.length)), x = Array.from({ length: count }, (_, i) => i + 1);
    drawChart(find("coefficients"), {
      title: `Coefficients at step ${step}`, yLabel: "κ of the skip", xLabel: "long skip i (1 is the outermost)", xName: "skip", integer: true,
      range: [0, Math.max(1.05, ...found.flatMap((entry) => entry.skips.map((skip) => skip.kappa * 1.05)))],
      band: { x, low: x.map((i) => 0.5 ** (i - 1)), high: x.map((i) => 0.95 ** (i - 1)) },
      groups: found.map((entry) => ({ label: entry.label, colour: colour(entry.label), dots: true, lines: [{ x: entry.skips.map((_, i) => i + 1), y: entry.skips.map((skip) => skip.kappa) }] })),
    });
    find("coefficients").querySelector(".legend")?.append(html("span", { class: "key" }, html("i", { class: "swatch" }), "band of constant scaling, κ from 0.5 to 0.95"),
      html("span", {}, "Colour in the maps: κ = 0 ", html("i", { class: "ramp", role: "img", "aria-label": "from light (0) to strong (1)" }), " κ = 1"));
  }

  function drawSamples() {
    if (!sampleSteps.length) { find("samples-section").hidden = true; return; }
    const step = sampleSteps[find("sample-step").value], seed = Number(find("sample-seed").value);
    find("sample-step-out").value = step;
    find("sample-step").setAttribute("aria-valuetext", `step ${step}`);
    find("samples").replaceChildren(...visible().flatMap((label) => runsOf(label).filter((run) => run.seed === seed).map((run) => {
      const sample = run.samples.filter((entry) => entry.step <= step).at(-1);
      const picture = sample ? html("img", { src: sample.image, alt: `Samples of ${label} after ${sample.step} steps, seed ${seed}`, "data-step": sample.step }) : html("p", { class: "none" }, "no samples yet");
      return html("div", { class: "card tile", style: `--c:${colour(label)}` }, html("h3", {}, label, html("small", {}, sample ? `step ${sample.step}` : "")), picture);
    })));
  }

  const KINDS = {
    gradient_norm: ["Gradient norm per block", "gradient norm"], "": ["Training", ""], probe_block_rms: ["Feature RMS per block, probe batch", "RMS of the feature"],
    probe_skip_rms: ["Feature RMS per skip, probe batch", "RMS of the skip"], held_out_loss: ["Held-out loss by noise level (log-SNR)", "held-out loss"], probe_similarity: ["Similarity of tokens per block (1: all alike)", "similarity"], update_ratio: ["Update relative to weight", "update / weight"], kappa: ["Coefficients κ_i", "κ of the skip"],
  };
  const kindOf = (name) => name === "gradient_norm" ? "gradient_norm" : name.includes("/") ? name.split("/")[0] : "";

  function fillSelectors() {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
    for (const [kind, [title]] of Object.entries(KINDS)) {
      const mine = names.filter((name) => kindOf(name) === kind);
      const text = (name) => name === "gradient_norm" ? "whole network, before clipping" : name === "gradient_norm/all" ? "whole network, as read by the monitor" : name.includes("/") ? name.slice(kind.length + 1) : name.replaceAll("_", " ");
      if (mine.length) find("quantity").append(html("optgroup", { label: title }, ...mine.map((name) => html("option", { value: name }, text(name)))));
    }
    // What a reader wants to see first: the gradient norm of the whole network.
    const favourite = ["gradient_norm", "gradient_norm/all"].find((name) => names.includes(name)) || names[0];
    if (favourite) find("quantity").value = favourite;
    find("stability-section").hidden = !names.length;
    find("quantity").addEventListener("change", drawExplorer);
    find("log").addEventListener("change", drawExplorer);
    const seeds = [...new Set(data.runs.map((run) => run.seed))].sort((a, b) => a - b);
    find("sample-seed").append(...seeds.map((seed) => html("option", { value: seed }, String(seed))));
    find("seed-label").hidden = seeds.length < 2;
    find("sample-seed").addEventListener("change", drawSamples);
    for (const [id, steps, redraw] of [["skip-step", readingSteps, drawSkips], ["sample-step", sampleSteps, drawSamples]]) {
      find(id).max = Math.max(0, steps.length - 1); find(id).value = Math.max(0, steps.length - 1);
      find(id).addEventListener("input", redraw);
    }
  }

  function drawExplorer() {
    const name = find("quantity").value, option = find("quantity").selectedOptions[0];
    if (!option) return;
    const [title, unit] = KINDS[kindOf(name)];
    const marks = data.alarms.filter((alarm) => shown.has(alarm.method)).map((alarm) => ({ x: alarm.step, colour: colour(alarm.method), text: `${alarm.method}, seed ${alarm.seed}, step ${alarm.step}: ${alarm.kind}. ${alarm.message}` }));
    drawChart(find("explorer"), { title: `${title.replace(" per block", "").replace(" per skip", "")}: ${option.textContent}`.replace("κ_i", "κ_i"), yLabel: unit || option.textContent, log: find("log").checked, groups: groups(name), marks });
    if (marks.length) find("explorer").querySelector(".legend")?.append(html("span", {}, "▲ an alarm, see below"));
  }

  // Loss: as it is, or where the curves lie on each other as the difference to the baseline under the same seed.
  const asDifference = {};
  function differences(name) {
    const base = new Map(runsOf(data.baseline).map((run) => [run.seed, line(run, name)]));
    return visible().map((label) => ({
      label, colour: colour(label),
      lines: runsOf(label).map((run) => {
        const mine = line(run, name), theirs = base.get(run.seed);
        if (!mine || !theirs) return null;
        const known = new Map(theirs.x.map((step, i) => [step, theirs.y[i]])), x = mine.x.filter((step) => known.get(step));
        return { x, y: x.map((step) => { const value = mine.y[mine.x.indexOf(step)]; return value === null ? null : 100 * (value / known.get(step) - 1); }) };
      }).filter((entry) => entry && entry.x.length),
    })).filter((group) => group.lines.length);
  }

  // Whether the means lie within a few hundredths of the chart's height from the baseline, over the second half.
  function overlap(name) {
    if (!data.baseline || data.methods.length < 2) return false;
    const means = groups(name).map((group) => ({ label: group.label, ...meanOf(group.lines) }));
    const base = means.find((mean) => mean.label === data.baseline);
    if (!base || means.length < 2) return false;
    const values = means.flatMap((mean) => mean.y.filter((value) => value > 0)), height = Math.log(Math.max(...values) / Math.min(...values)) || 1;
    return means.filter((mean) => mean !== base).every((mean) => {
      const apart = mean.x.map((step, i) => [mean.y[i], valueAt(base, step)]).slice(Math.floor(mean.x.length / 2)).filter(([a, b]) => a > 0 && b > 0).map(([a, b]) => Math.abs(Math.log(a / b)));
      return apart.length && apart.reduce((a, b) => a + b, 0) / apart.length < 0.06 * height;
    });
  }

  // The same quantity on images that were trained on, as dashed lines, and the name of what the network predicts.
  const UNITS = { epsilon: "ε", v: "v", x0: "x₀", flow: "ε − x₀" };
  const unitOf = () => [...new Set(data.runs.map((run) => UNITS[run.prediction] ?? run.prediction).filter(Boolean))].join(" or ");
  const trainedOn = (name) => name === "held_out_loss" ? groups("trained_on_loss").map((group) => ({ ...group, label: `${group.label}, images trained on`, dash: true })) : [];

  function drawLoss(id, name, title, yLabel) {
    const possible = data.baseline && data.methods.length > 1 && shown.has(data.baseline) && differences(name).length > 1;
    asDifference[id] ??= overlap(name);
    const on = possible && asDifference[id];
    let controls = null;
    if (possible) {
      const box = html("input", { type: "checkbox", ...(on ? { checked: "" } : {}) });
      box.addEventListener("change", () => { asDifference[id] = box.checked; drawLoss(id, name, title, yLabel); find(id).querySelector("input").focus(); });
      controls = html("label", { class: "check" }, box, ` difference to ${data.baseline}`);
    }
    drawChart(find(id), on
      ? { title: `${title}: difference to ${data.baseline}`, yLabel: `difference to ${data.baseline}, %`, unit: " %", zero: true, groups: differences(name), controls }
      : { title, yLabel, log: true, groups: [...groups(name), ...trainedOn(name)], controls });
  }

  function drawConfigs() {
    find("configs").replaceChildren(...data.runs.map((run) => html("details", { style: `--c:${colour(run.label)}` },
      html("summary", {}, html("i"), `${run.label}, seed ${run.seed}${run.diverged !== null ? " (diverged)" : run.finished ? "" : " (not finished)"}`),
      html("div", {}, html("pre", { tabindex: "0", "aria-label": "configuration" }, run.config), html("pre", { tabindex: "0", "aria-label": "environment and data" }, JSON.stringify({ data: run.data, environment: run.environment }, null, 2))))));
    find("config-section").hidden = !data.runs.length;
  }

  function drawDiagnosis() {
    if (!data.diagnosis) return;
    find("diagnosis-section").hidden = false;
    const { rows, facts, reasons } = data.diagnosis;
    find("diagnosis").replaceChildren(html("div", { class: "card" },
      html("dl", { class: "facts" }, ...Object.entries(facts).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)])),
      html("ul", { class: "hint" }, ...reasons.map((reason) => html("li", {}, reason)))),
      tableOf("Long skips before the first step", rows));
  }

  function draw() {
    drawTables(); drawAlarms(); drawCopies();
    find("loss-section").hidden = !data.runs.length;
    drawLoss("held-out", "held_out_loss", "Loss on held-out images, averaged weights", "mean squared error in ε");
    drawLoss("train-loss", "loss", "Loss that training minimises", `mean squared error in ${unitOf() || "what is predicted"}`);
    drawSkips(); drawSamples(); drawExplorer(); drawDiagnosis();
    find("range-section").hidden = !data.ranges.length;
    drawRanges(find("ranges"), data.ranges, tableOf);
    find("results").hidden = !data.tables.length;
    noteOverflow();
  }

  // Skips that nothing scales are folded away. A chart has no width while it is folded, so it is drawn when it opens.
  find("skips-fold").open = data.runs.some((run) => kappaNames(run).some((name) => run.curves[name][1].some((value) => value !== null && Math.abs(value - 1) > 1e-6)));
  find("skips-fold").addEventListener("toggle", drawSkips);

  // Live: ask for a mark of the state, and load the page again when it has changed.
  if (data.live) setInterval(() => fetch("state").then((answer) => answer.text()).then((state) => { if (state !== data.live) location.reload(); }).catch(() => { /* the server has ended */ }), 3000);

  startTheme(); makeToggles(); fillSelectors(); drawConfigs(); drawVerdict();
  find("version").textContent = data.version;
  const seeds = new Set(data.runs.map((run) => run.seed)).size, plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  find("lead").textContent = !data.runs.length ? "" : `${plural(data.runs.length, "run")}: ${data.methods.join(", ")}; ${plural(seeds, "seed")}, up to ${lastStep} steps.` + (data.runs.length > 1 ? " Runs of one seed share initial weights, order of data and noise; they differ in what their names say." : "");
  if (data.runs.length === 1) {
    find("lead").textContent = `Up to ${plural(lastStep, "step")}, with the scaling ${data.methods[0]}, seed ${data.runs[0].seed}.`;
    find("samples-hint").textContent = "From the same noise at every step. Move the slider to see them form.";
    find("loss-hint").textContent = "Point at a curve, or focus it and use the arrow keys.";
  }
  draw();
  drawGlossary(find("glossary"));
  // Paper is white: colours that the script computes are drawn for it, and the theme comes back afterwards.
  let screenTheme = null;
  addEventListener("beforeprint", () => { screenTheme = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; draw(); });
  addEventListener("afterprint", () => { document.documentElement.dataset.theme = screenTheme; draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 120); });
})();
